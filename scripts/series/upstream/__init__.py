"""Other releases of upstream: what becomes of the patches there, and what else has changed."""
