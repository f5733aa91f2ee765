"""The build system: one module for each step from the pinned source to a proved wheel."""
