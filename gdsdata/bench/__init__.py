"""`python -m gdsdata.bench`: gdsdata beside its alternatives and hardware limits.

- `cases/` has one folder a case: its settings, what it measures, and how it reports that.
- `peers/` has modules of libraries, whose classes are the rows of each case.
- `harness/` runs rows in turns, measures limits between them, and makes one result.
- `measure/` knows clocks, memory, the page cache, the GPU, and the machine's limits.
- `data/` is what is read and written, and what its bytes must be.
- `report/` makes tables, pages and pictures.

`run` measures one case and writes its report. `compare` says what changed between two runs.
"""
