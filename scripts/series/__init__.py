"""The patches, as files and as commits: apply, export, check, and move them to another release."""
