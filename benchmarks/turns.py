"""Let rows of a benchmark take turns, in processes with memory and imports of their own."""

import contextlib
import multiprocessing
import os
import random
import sys

PATIENCE_S = 120  # the limit of making and checking a row, and of a turn

MOST_SAID = 300  # characters of an error, in a table

processes = multiprocessing.get_context("forkserver")


class Turns:
    """A row's process, seen from outside.

    Args:
        name: for the table.
        package: what pip installs, if the row is another project's.
        make, arguments: a function of a module's top level, and its arguments. It is called in the
            row's process, makes and checks the row, and returns the function that takes a turn.
            `results` collects what that function returns.
    """

    def __init__(self, name, package, make, *arguments):
        self.name, self.package, self.results = name, package, []
        self.connection, other = processes.Pipe()
        self.process = processes.Process(target=_serve, args=(other, make, arguments))
        self.process.start()
        other.close()

    def made(self):
        """Return itself once the row is made and checked, or has failed."""
        self.error, _ = self._answer()
        return self

    def _answer(self):
        """Return the error, if there is one, and the result."""
        if not self.connection.poll(PATIENCE_S):
            self.process.kill()
            return f"no answer for {PATIENCE_S} s", None
        try:
            return self.connection.recv()
        except EOFError:
            self.process.join()
            return f"its process ended with {self.process.exitcode}", None

    def take(self):
        self.connection.send("go")
        self.error, result = self._answer()
        if self.error is None:
            self.results.append(result)

    def end(self):
        with contextlib.suppress(OSError):
            self.connection.send("end")
        self.process.join(10)
        self.process.kill()

    @property
    def why_not(self):
        """Return the reason for the table if there are no results."""
        if self.package and self.error.startswith("ModuleNotFoundError"):
            return f"not installed: pip install {self.package}"
        return f"failed: {self.error}"


def take_all(turns):
    """Take a turn of each row that has not failed, in random order."""
    for turn in random.sample(turns, len(turns)):
        if turn.error is None:
            turn.take()


def end_all():
    """End the processes of all rows, whatever they do."""
    for process in multiprocessing.active_children():
        process.kill()


def _serve(connection, make, arguments):
    os.dup2(2, 1)  # libraries' prints are no result
    try:
        take = make(*arguments)
        connection.send((None, None))
        while connection.recv() == "go":
            connection.send((None, take()))
    except Exception as error:
        said = " ".join(str(error).replace("|", "/").split())
        connection.send((f"{type(error).__name__}: {said[:MOST_SAID]}", None))
    finally:
        connection.close()
        sys.stderr.flush()
        for worker in multiprocessing.active_children():  # a loader's; nothing else would end them
            worker.kill()
        os._exit(0)  # some libraries' threads outlive the interpreter's patience
