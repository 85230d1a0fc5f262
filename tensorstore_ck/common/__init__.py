"""What every area uses: knows no store.

buffers.py           bytes as callers pass them; items in batches of up to a number of bytes
byte_cache.py        decoded objects in memory, up to a number of bytes
waiting.py           threads that wait for a change
condition_values.py  the values that a test in a condition may compare with
conditions.py        conditions on metrics and fields, parsed into a tree
deprecation.py       old spellings of arguments and methods
descriptors.py       file descriptors that a block closes, and paths made durable
executor.py          long work, by threads of this process or a Dask cluster
extras.py            what optional parts need, and the error where it is not installed
filesystem_kind.py   the type of filesystem that a folder is on
folder_identity.py   which folder a path names
foreign_text.py      JSON and TOML of unknown origin
free_space.py        whether there is enough free space, checked before writing
html_table.py        escaped tables for notebooks
host_memory.py       how much memory is free, and allocations that failed
huge_pages.py        memory in huge pages, where the system has them
ids.py               ULIDs and BLAKE3 hashes
local_path.py        paths on this host, where a user may give a URL
metric_condition.py  conditions on metrics alone, as functions
owned_files.py       whether files and folders are one user's alone
prices.py            what a gigabyte costs a month at each location
printed_commands.py  commands in messages name their store
private_folder.py    a folder of this user alone
processes.py         which process this is, and whether another one has ended
signing_keys.py      Ed25519 keys, which sign refs
save_progress.py     where the time and the bytes of a save go
rate_limit.py        a token bucket
replace_file.py      a small file that replaces another one at once
retry.py             waits that can be ended, and retries
similar_names.py     which known names a user may have meant
stagger.py           when ranks and jobs begin to write
threads.py           the start of a thread, many threads over a stream of tasks, work that Ctrl-C does not cut in two, a lock that a
                     forked child can use
units.py             times and sizes as people write them
user_frames.py       errors and warnings without frames of this package
"""
