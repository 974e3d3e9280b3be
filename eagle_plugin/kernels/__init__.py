"""One typed function per operation: C++ on the CPU, CUDA or Triton on a GPU, the torch oracle where no kernel runs."""
