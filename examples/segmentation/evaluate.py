"""Score a checkpoint on the validation images: pixel accuracy and mIoU, next to the best constant prediction.

    python evaluate.py --resume runs/demo/SyncBatchNorm/best.ckpt --data-root runs/minidata --cpus 2

The scores are over centre crops, as during training. With --testval, they are over whole images (--scales, --flip).
"""

from __future__ import annotations

import sys

from devices import contexts, prepare_mxnet
from errors import run
from options import check_dataset, evaluate_parser, take_model_options


def main(argv=None) -> int:
    parser = evaluate_parser(__doc__.splitlines()[0])
    parser.add_argument("--testval", action="store_true", help="use whole images instead of centre crops")
    args = parser.parse_args(argv)
    prepare_mxnet(args)
    from checkpoint import load_checkpoint
    from dataset import check_folder
    from predictor import load_network
    from scores import best_constant

    check_dataset(args)
    devices = contexts(args)
    checkpoint = load_checkpoint(args.resume)
    take_model_options(args, checkpoint.state)
    count = check_folder(args.data_root, "val", args.check_data or None)
    net = load_network(args, checkpoint, devices)
    scores = (whole_image_scores if args.testval else crop_scores)(args, net, devices)
    pix_acc, miou = scores.get()
    print(f"{count} images: pixAcc {pix_acc:.4f}, mIoU {miou:.4f}")
    constant = best_constant(scores.truth)
    print("best constant prediction: pixAcc {:.4f}, mIoU {:.4f}".format(*constant))
    return 0


def crop_scores(args, net, devices):
    """Scores over centre crops, read by loader workers."""
    from dataset import NUM_CLASS, Loader, Scenes
    from scores import validate
    from tqdm import tqdm

    data = Scenes(args.data_root, "val", "val", args.base_size, args.crop_size, seed=0)
    loader = Loader(data, args.test_batch_size, args.workers, seed=0, shuffle=False)
    try:
        with tqdm(total=len(loader), unit="batch", leave=False, disable=None) as bar:
            return validate(net, loader.batches(), devices, NUM_CLASS, bar)
    finally:
        loader.close()


def whole_image_scores(args, net, devices):
    """Scores over images in their own size. Each device takes one image at a time."""
    import mxnet as mx
    from dataset import NUM_CLASS, Scenes, read_image, read_mask
    from predictor import Predictor
    from scores import Scores
    from tqdm import tqdm

    data = Scenes(args.data_root, "val", "testval", args.base_size, args.crop_size, seed=0)
    predictor = Predictor(net, devices, args.base_size, args.crop_size, args.flip, args.scales)
    scores = Scores(NUM_CLASS)
    pairs = list(zip(data.images, data.masks))
    for i in tqdm(range(0, len(pairs), len(devices)), leave=False, disable=None):
        part = pairs[i : i + len(devices)]
        predictions = predictor.scores([read_image(image) for image, _ in part])
        masks = [mx.nd.array(read_mask(mask)[None].astype("int32") - 1, dtype="int32") for _, mask in part]
        scores.update(masks, predictions)
    return scores


if __name__ == "__main__":
    sys.exit(run(main))
