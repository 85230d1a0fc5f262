"""`tsck`: the store from a shell. Parses the command line, calls `Store`, prints the result.

Only this package reads environment variables (``TSCK_STORE``, ``TSCK_CACHE_DIR``). A command that needs torch imports it when it runs, so
that all others start fast and run without it. With ``--json`` stdout holds one document; progress and warnings go to stderr.

app.py                the program: errors, warnings and exit codes; TSCK_DEBUG=1: what was decided, and why, in a file
command_groups.py     the commands by group, options before the command, the exit codes, and what `tsck help` prints
options.py            options that commands share, and the `StoreChoice` that they make
cmd_*.py              the commands, named in the file's name
model_files.py        model files as states, for `tsck put` and `tsck get`
output.py             prints tables, facts and JSON
pager.py              prints long results through a pager
progress.py           progress bars
complete_names.py     completes refs, steps and metrics; notes which cache belongs to a remote store
shell_completion.py   candidates for a shell when Tab is pressed, and the shells' scripts
run_user_program.py   runs the user's program for a snapshot
plot.py               curves, as text and as PNG
hints.py              completes the commands in messages
standard_streams.py   stdout and stderr that are closed, full or broken
allowed_locations.py  the user's file of allowed locations for moved packs
"""

from tensorstore_ck.cli.app import main

__all__ = ["main"]
