"""The CSV files of a run: epochs.csv has one row per epoch, and steps.csv one row per step."""

from __future__ import annotations

import csv
import os

from checkpoint import replace_file

EPOCH_FIELDS = ("epoch", "train_loss", "lr", "pixAcc", "mIoU", "images_per_second", "seconds")
STEP_FIELDS = ("epoch", "step", "loss", "lr")


def write_epochs(folder: str, history: list) -> None:
    """Write the whole table. The checkpoint holds the table, so no row is missing or doubled."""

    def write(name):
        with open(name, "w", newline="") as file:
            table = csv.DictWriter(file, EPOCH_FIELDS)
            table.writeheader()
            table.writerows(history)

    replace_file(os.path.join(folder, "epochs.csv"), write)


class StepLog:
    """Appends to steps.csv, which counts epochs and steps from 1.

    epoch, step: the position at which the run continues, counted from 0. The constructor drops later rows.
    """

    def __init__(self, folder: str, epoch: int = 0, step: int = 0):
        path = os.path.join(folder, "steps.csv")
        rows = []
        if (epoch or step) and os.path.exists(path):
            with open(path, newline="") as file:
                rows = [row for row in csv.reader(file) if _before(row, epoch, step)]

        def write(name):
            with open(name, "w", newline="") as file:
                csv.writer(file).writerows([STEP_FIELDS, *rows])

        replace_file(path, write)
        self._file = open(path, "a", newline="")  # noqa: SIM115, closed in close()
        self._table = csv.writer(self._file)

    def add(self, epoch: int, step: int, loss: float, lr: float) -> None:
        self._table.writerow((epoch, step, f"{loss:.6g}", f"{lr:.6g}"))
        self._file.flush()  # a reader may follow the file, and a killed run keeps its rows

    def close(self) -> None:
        self._file.close()


def _before(row: list, epoch: int, step: int) -> bool:
    try:
        return len(row) == len(STEP_FIELDS) and (int(row[0]) - 1, int(row[1]) - 1) < (epoch, step)
    except ValueError:  # the header, or an incomplete line of a killed run
        return False


def read_table(path: str) -> list:
    """The rows of one of the files, as dictionaries of numbers. An empty cell is None."""
    with open(path, newline="") as file:
        return [{k: float(v) if v else None for k, v in row.items()} for row in csv.DictReader(file)]
