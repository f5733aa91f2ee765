"""Build wheels: which, here or in containers, and again to compare."""
