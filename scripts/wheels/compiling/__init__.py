"""From the patched tree to objects: units, flags, keys; ninja and the compile cache."""
