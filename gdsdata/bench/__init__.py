"""`python -m gdsdata.bench`: GDSDataset beside its alternatives and beside what the machine can do (--help says more).

loader    the case: which rows, in which order, into one result
peers     GDSDataset and the alternatives, behind one small interface
row       the process of one row
limits    what the machine can do at most
measure   CPU time, memory, the page cache's state
data      data sets, made or the user's own, and what their batches must be
report    tables, JSON, picture, markdown
settings  what can be set, and the text of --help
"""
