"""What is built and from which source: the matrix, and releases of upstream."""
