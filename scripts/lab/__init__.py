"""What no build needs: measure kernels, the build and the series; compare machine code; emulate."""
