"""Find or install what compiles: a CUDA toolkit, a C++ compiler, torch, apache-tvm-ffi."""
