"""From the patched tree to a proved wheel: toolchain, kernels, link and packing, containers, proof."""
