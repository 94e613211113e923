"""The libraries that rows are measured with, a module each; `registry` finds the rows of a case
among them.
"""
