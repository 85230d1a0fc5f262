"""The demo: a training job that is killed several times, and ends bit-identical to one that was not.

train.py        the job, and the example to copy
model.py        its model
data.py         its data
story.py        runs the job with and without kills, and compares the results
supervisor.py   starts, watches and kills the job
compare.py      compares states bit by bit
page.py         prints
__main__.py     the command line: ``python -m examples.demo``
"""
