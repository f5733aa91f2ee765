"""A program: ``python -m flash_attn.doctor``. Nothing of it is imported by flash_attn."""
