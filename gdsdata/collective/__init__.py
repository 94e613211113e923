"""Read once, give to all: the ranks of a process group share what they read.

`agreement` keeps the ranks in step, and has an error of one raised on all. `plan` says who reads
what and who gets it. `transfers` carries that out, with the `reads` of one rank. `peers` serves
data sets, whose processes work ahead of the program. `gloo` makes their groups, and ends them when
a rank is lost.
"""
