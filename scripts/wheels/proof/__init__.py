"""Prove a wheel on a GPU: its suite, its test program, the state that it was built from."""
