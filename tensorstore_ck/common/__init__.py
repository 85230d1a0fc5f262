"""What every area uses and none owns: ids, units, threads, retries, free space, rate limits, deprecated spellings. Knows no store."""
