"""The build system: a package for each part of the way from the pinned source to a proved wheel.

docs/architecture.md shows the way.
"""
