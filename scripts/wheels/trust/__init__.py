"""Read a wheel and what lies beside it, and check both; write and sign statements. Nothing is built."""
