"""The patches, as files and as commits: apply, export, edit and check them."""
