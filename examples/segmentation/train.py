"""Train a GluonCV segmentation network on ADE20K, with or without synchronised batch normalisation.

    python train.py --data-root ~/.mxnet/datasets/ade --model psp --backbone resnet50 --aux --syncbn \\
                    --ngpus 4 --batch-size 16 --crop-size 480 --base-size 520 --lr 0.01 --epochs 120
    mpiexec -n 4 python train.py --kvstore mpi --ngpus 1 ...    # the same in four processes

Options have the names of GluonCV's own training script. Results (last.ckpt, best.ckpt, epochs.csv,
steps.csv) go to --save-dir. Ctrl-C saves the run and stops it. --resume continues it to the same result.
Exit codes: 0 done, 2 bad input, 3 the loss is not finite, 130 interrupted and saved.
"""

from __future__ import annotations

import sys

from devices import prepare_mxnet
from errors import run
from options import check_train, train_parser


def main(argv=None) -> int:
    args = train_parser().parse_args(argv)
    check_train(args)
    prepare_mxnet(args)
    from training import train  # slow, so imported after the check of the options

    return train(args)


if __name__ == "__main__":
    sys.exit(run(main))
