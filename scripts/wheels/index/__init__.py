"""Make a static index of wheels: what installers read, and what people read."""
