"""Operations of people on a store, offline or while jobs use it. No torch.

fsck/                checks and repairs a store
salvage/             makes a new log from the remaining objects of a store
copy_store/          copies refs and their blocks to another store
describe/            shows and compares snapshots
prove.py             makes and checks proofs that a tensor belongs to a snapshot
list_refs.py         branches and tags, the history of branches, and which snapshots led to the last one
change_refs.py       branch, reset, tag, untag, annotate, mark, finish, pin, unpin: one log entry each
forget.py            forget and undo
recorded_runs.py     gc, fsck and repair, with an entry in the log about the outcome
apply_policies.py    sets, shows and applies retention policies
bisect_history.py    the first bad snapshot of a branch
quotas.py            sets and removes quotas
watch.py             yields new snapshots of a branch, each pinned meanwhile
advise.py            advises how often to save
plan_training.py     what the snapshots of a training will take
count_parameters.py  how many parameters a config or an index describes
metric_plot.py       a metric over snapshots, as points and drawn by matplotlib
optimal_interval.py  the formulas of Young and Daly, and ETTR
"""
