"""The command about what is durable on this host's disk, and not published yet."""

import os
import sys
import time
from contextlib import closing

import click

from tensorstore_ck.cli.options import StoreChoice, command, store_options
from tensorstore_ck.cli.output import ROOT_DIGITS, counted, emit, green, indented, iso_time, printable, red, short_root, table
from tensorstore_ck.durations import human_seconds
from tensorstore_ck.engine import Engine
from tensorstore_ck.errors import InvalidOptionError, NotFoundError, StoreError
from tensorstore_ck.grouped import Groups
from tensorstore_ck.ids import parse_ulid
from tensorstore_ck.opening import open_engine
from tensorstore_ck.saving.course import Course
from tensorstore_ck.saving.handle import Handle
from tensorstore_ck.saving.resumed import ResumedJob, resume_here, sweep
from tensorstore_ck.seen import Seen
from tensorstore_ck.sizes import human_bytes
from tensorstore_ck.snapshot import Snapshot
from tensorstore_ck.staging.listing import StagedPut, list_staged
from tensorstore_ck.staging.publish import drop
from tensorstore_ck.tiers import StagingFolder
