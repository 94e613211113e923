"""`python -m gdsdata.bench`: gdsdata beside its alternatives and beside what the machine can do
(--help says more).

    cases/    one folder a case: its settings, what it measures, and how it reports that
    peers/    one module a library, which registers the rows that it can serve in each case
    harness/  processes of rows that take turns, limits between them, one result
    measure/  clocks, memory, the page cache, the GPU, and the machine's limits
    data/     what is read and written, and what its bytes must be
    report/   tables, pages and pictures

`run` measures one case and writes its report. `compare` says what changed between two runs.
"""
