"""One typed function an operation: C++ on the CPU where a library is at hand, the torch oracle elsewhere."""
