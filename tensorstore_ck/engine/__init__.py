"""One open store: reads a snapshot from its blocks, and writes one in an order that makes a crash harmless. No torch."""
