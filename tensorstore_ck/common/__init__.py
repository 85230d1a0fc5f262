"""What every area uses and none owns: ids, units, threads, retries, free space, rate limits. Knows no store."""
