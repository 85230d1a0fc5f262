"""The common parts of the adapters of trainers; each trainer's folder says what that trainer is like.

versions.py             which versions of a trainer's package are supported, and whether the names that are used are as they were
attach.py               makes an object of a trainer save into a store
saves.py                when a run saves, and to which ref it may
pointers.py             what a pointer names; the pointers that name the saves of a run
persistent_workers.py   workers of data loaders that live for all passes, in a process that resumes

From which snapshot a run resumes is the rule of `tensorstore_ck.training.resume_search`.
"""
