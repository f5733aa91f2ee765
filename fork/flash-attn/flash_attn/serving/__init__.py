"""What other programs load: attention for Transformers' models, and backends of serving engines."""
