"""A training run, from options to a trained network, with validation, checkpoints and exact resume."""

from __future__ import annotations

import contextlib
import math
import os
import sys
import time
import zlib

import mxnet as mx
from checkpoint import (
    check_arrays,
    load_checkpoint,
    load_trainer,
    net_arrays,
    remove_strays,
    save_checkpoint,
    set_arrays,
    set_devices,
)
from dataset import NUM_CLASS, Loader, Scenes, check_folder
from devices import check_batch, contexts
from errors import EXIT_INTERRUPTED, NotFiniteError, UserError
from gluoncv.utils import LRScheduler, LRSequential
from interrupt import Interrupt
from model import build_loss, build_model, described, norm_layer, outputs, plain_network
from mxnet import autograd, gluon
from options import CHECKPOINTS, RUN_OPTIONS, check_options, check_save_dir, continues, extends
from processes import processes
from randomness import Xavier, random_state, seed_all, seed_device, set_random_state
from records import StepLog, write_epochs
from scores import spread, validate
from tqdm import tqdm


def train(args) -> int:
    """Train with `args` (of options.train_parser). Return the exit code."""
    run = Run(args)
    try:
        with Interrupt(quiet=run.processes.rank > 0) as interrupt:
            return run.go(interrupt)
    finally:
        run.close()


class Run:
    """The parts of a run, and its position: it has done `epoch` epochs, and `step` steps of the next epoch."""

    def __init__(self, args):
        self.args = args
        self.processes = processes(args)
        with self.processes.together():
            checkpoint = self._check()
        self._check_same(checkpoint)
        with contextlib.ExitStack() as opened:  # closes the open parts if a later one fails
            self._build(checkpoint, opened)
            self.close = opened.pop_all().close

    # -- building ------------------------------------------------------------------------------------

    def _check(self):
        """Check everything that is known before training. Return the checkpoint, if there is one."""
        args = self.args
        self.contexts = contexts(args)
        self.devices = self.processes.size * len(self.contexts)  # of all processes
        self.first_device = self.processes.rank * len(self.contexts)
        counts = {split: check_folder(args.data_root, split, args.check_data or None) for split in ("train", "val")}
        check_batch(args, self.devices, counts["train"])
        checkpoint = load_checkpoint(args.resume) if args.resume else None
        if checkpoint and checkpoint.state:
            check_options(args, checkpoint)
        if self.processes.rank == 0:
            check_save_dir(args)
            try:
                os.makedirs(args.save_dir, exist_ok=True)
            except OSError as error:
                raise UserError(f"--save-dir {args.save_dir}: cannot be made ({error})") from None
        return checkpoint

    def _check_same(self, checkpoint):
        """Check that all processes will make the same steps. Each reads its own command line, folder and checkpoint."""
        args = self.args
        self.processes.check_same("--ngpus or --cpus", [context.device_type for context in self.contexts])
        self.processes.check_same("the options", [getattr(args, name) for name in (*RUN_OPTIONS, "no_val")])
        if checkpoint and checkpoint.state:
            found = [checkpoint.state, zlib.crc32(checkpoint.trainer_states)]
            self.processes.check_same(f"--resume {args.resume}", found)

    def _build(self, checkpoint, opened):
        args = self.args
        self.train_data, self.val_data = self._loaders()
        opened.callback(self.train_data.close)
        opened.callback(self.val_data.close)
        self.epoch, self.step = args.start_epoch, 0
        self.loss_sum = 0.0  # of the epoch's steps so far
        self.history = []
        self.best = -1.0
        self.settled = False  # the trainer has made its first step
        seed_all(args.seed)
        self.net = self._network(checkpoint)
        self.loss = build_loss(args)
        self.trainer = self._trainer()
        if checkpoint and checkpoint.state:
            self._continue(checkpoint)
        self._hybridize()
        # Validation has a network of its own. The network in training is bound to its batch size (--mode static). And
        # plain BatchNorm's running statistics differ by device, but validation must score the saved ones.
        self.val_net = plain_network(args, self.contexts)
        self.val_net.hybridize()
        self.log = None
        with self.processes.together():
            if self.processes.rank == 0:
                if not continues(args):  # --overwrite is given, or the folder has no checkpoints
                    for name in CHECKPOINTS:
                        with contextlib.suppress(FileNotFoundError):
                            os.remove(os.path.join(args.save_dir, name))
                remove_strays(args.save_dir)
                self.log = StepLog(args.save_dir, self.epoch, self.step)
                opened.callback(self.log.close)

    def _loaders(self):
        args = self.args
        size = {"base_size": args.base_size, "crop_size": args.crop_size, "seed": args.seed}
        train_set = Scenes(args.data_root, "train", "train", **size)
        val_set = Scenes(args.data_root, "val", "val", **size)
        self.processes.check_same("--data-root", [os.path.basename(name) for name in train_set.images + val_set.images])
        rest = {"workers": args.workers, "seed": args.seed, "processes": self.processes}
        return (
            Loader(train_set, args.batch_size, shuffle=True, **rest),
            Loader(val_set, args.test_batch_size, shuffle=False, **rest),
        )

    def _network(self, checkpoint):
        args = self.args
        with self.processes.one_on_each_machine_first(args) if args.pretrained_base else contextlib.nullcontext():
            net = build_model(args, norm_layer(args.syncbn))
        if args.pretrained_base:
            net.collect_params().reset_ctx(self.contexts)
        else:
            net.initialize(Xavier(), ctx=self.contexts, force_reinit=True)
        # One forward fixes the shapes that GluonCV leaves open. A crop that the network cannot take fails here.
        net(mx.nd.zeros((1, 3, args.crop_size, args.crop_size), ctx=self.contexts[0]))
        if checkpoint:
            with self.processes.together():
                check_arrays(net, checkpoint, described(args))
            set_arrays(net, checkpoint.arrays)
        self.processes.broadcast(net)
        if args.no_wd:
            for parameter in net.collect_params(".*beta|.*gamma|.*bias").values():
                parameter.wd_mult = 0.0
        return net

    def _trainer(self):
        args = self.args
        steps = len(self.train_data)
        schedules = []
        if args.warmup_epochs:
            schedules.append(
                LRScheduler("linear", base_lr=0, target_lr=args.lr, nepochs=args.warmup_epochs, iters_per_epoch=steps)
            )
        # GluonCV's schedule divides by the number of steps minus one.
        iters = max(2, (args.epochs - args.warmup_epochs) * steps)
        schedules.append(LRScheduler("poly", base_lr=args.lr, niters=iters, power=0.9))
        settings = {"wd": args.weight_decay, "lr_scheduler": LRSequential(schedules)}
        settings["begin_num_update"] = args.start_epoch * steps
        if args.optimizer == "sgd":
            settings["momentum"] = args.momentum
        parameters = self.net.collect_params()
        if self.processes.kvstore:
            # Every process gets the summed gradients, and makes the same update.
            store = {"kvstore": self.processes.kvstore, "update_on_kvstore": False}
        else:
            store = {"kvstore": args.kvstore or ("device" if self.contexts[0].device_type == "gpu" else "local")}
        return gluon.Trainer(parameters, args.optimizer, settings, **store)

    def _continue(self, checkpoint):
        state = checkpoint.state
        schedule = self.trainer._optimizer.lr_scheduler
        load_trainer(self.trainer, checkpoint, self.contexts)  # copies the first device's values to all devices
        if extends(self.args, state):  # otherwise the checkpoint's schedule is the same
            self.trainer._optimizer.lr_scheduler = schedule
            whole = f"a run of {self.args.epochs}"
            self._say(f"{state['epoch']} epochs are done; the learning rate continues as in {whole}")
        set_devices(self.net, checkpoint.devices, self.first_device)
        self.epoch, self.step = state["epoch"], state["step"]
        self.loss_sum, self.history, self.best = state["loss_sum"], state["history"], state["best"]
        set_random_state(state["random"])

    def _hybridize(self):
        if self.args.mode != "imperative":
            static = self.args.mode == "static"  # the crop size is fixed, so the shapes are fixed too
            self.net.hybridize(static_alloc=static, static_shape=static)
        # The loss is not hybridized: GluonCV's loss reads the dtype of its input, which a symbol does not have.

    # -- running -------------------------------------------------------------------------------------

    def go(self, interrupt) -> int:
        args, steps = self.args, len(self.train_data)
        if self.epoch >= args.epochs:
            self._say(f"nothing to do: {args.resume} has all {args.epochs} epochs")
        for epoch in range(self.epoch, args.epochs):
            speed = self._train_epoch(interrupt)
            if speed is None:
                return self._stop()
            row = {"epoch": epoch + 1, "train_loss": self.loss_sum / steps, "lr": self.trainer.learning_rate}
            row.update(speed)
            if not args.no_val:
                scores = self._validate(interrupt)
                if scores is None:
                    return self._stop()
                row["pixAcc"], row["mIoU"] = scores.get()
            self._end_epoch(row)
        return 0

    def _train_epoch(self, interrupt) -> dict | None:
        """Train one epoch. Return its speed for epochs.csv, or None if the user interrupted it."""
        args, steps, first = self.args, len(self.train_data), self.step
        begin = time.time()
        text = f"epoch {self.epoch + 1}/{args.epochs}"
        with self._bar(text, steps, first) as bar:
            for images, masks in self.processes.each(self.train_data.batches(self.epoch, first)):
                loss, stop = self._train_step(images, masks, interrupt)
                self.step += 1
                self.loss_sum += loss
                if self.log:
                    self.log.add(self.epoch + 1, self.step, loss, self.trainer.learning_rate)
                mean = self.loss_sum / self.step
                speed = (self.step - first) * args.batch_size / (time.time() - begin)
                bar.set_postfix_str(f"loss {mean:.3f}, {speed:.1f} images/s", refresh=False)
                bar.update(1)
                if bar.disable and self.step % args.log_interval == 0:
                    self._say(f"{text} step {self.step}/{steps}: loss {mean:.3f}, {speed:.1f} images/s")
                if stop:
                    return None
        seconds = time.time() - begin
        done = (self.step - first) * args.batch_size
        return {"seconds": round(seconds, 2), "images_per_second": round(done / seconds, 3) if done else None}

    def _train_step(self, images, masks, interrupt) -> tuple:
        """One step over all devices of all processes. Return (loss, whether to stop), the same in all processes.

        A device waits for the others' statistics. The step therefore hands out the work of every device before it waits
        for a result.
        """
        images, masks = spread(images, self.contexts), spread(masks, self.contexts)
        losses = []
        with autograd.record():
            for i, (x, y) in enumerate(zip(images, masks), self.first_device):
                seed_device(x.context, self.args.seed, self.epoch, self.step, i)
                losses.append(self.loss(*outputs(self.net, x), y))
        autograd.backward(losses)
        if not self.settled:
            # The trainer's first step copies the first device's values to all devices, running statistics included. A
            # static graph's operators do not tell MXNet's engine that they write these statistics. Without waitall, the
            # copy would not wait for the operators.
            mx.nd.waitall()
            self.settled = True
        self.trainer.step(self.args.batch_size)
        loss = sum(float(loss.asnumpy().mean()) for loss in losses)
        loss, stop = self.processes.sum([loss, interrupt.requested])
        loss = float(loss) / self.devices
        if not math.isfinite(loss):
            with self.processes.together():
                raise NotFiniteError(
                    f"the loss is {loss} in epoch {self.epoch + 1}, step {self.step + 1}: stopped, without saving "
                    f"after the last checkpoint; try a lower --lr than {self.args.lr:g}"
                )
        return loss, bool(stop)

    def _validate(self, interrupt):
        set_arrays(self.val_net, net_arrays(self.net, self.processes)[0])
        with self._bar("validation", len(self.val_data)) as bar:
            return validate(
                self.val_net,
                self.val_data.batches(),
                self.contexts,
                NUM_CLASS,
                bar,
                lambda: interrupt.requested,
                self.processes,
            )

    def _end_epoch(self, row):
        better = row.get("mIoU", -1.0) > self.best
        self.best = max(self.best, row.get("mIoU", -1.0))
        self.history.append(row)
        self.epoch, self.step, self.loss_sum = self.epoch + 1, 0, 0.0
        with self.processes.together():
            if self.processes.rank == 0:
                write_epochs(self.args.save_dir, self.history)
        # best.ckpt comes first: a run killed in between repeats this epoch and writes both again.
        self._save(["best.ckpt", "last.ckpt"] if better else ["last.ckpt"])
        text = f"epoch {self.epoch}/{self.args.epochs}: loss {row['train_loss']:.3f}"
        if "mIoU" in row:
            text += f", pixAcc {row['pixAcc']:.3f}, mIoU {row['mIoU']:.3f}{' (best)' if better else ''}"
        self._say(text)

    def _stop(self) -> int:
        self._save(["last.ckpt"])
        path = os.path.join(self.args.save_dir, "last.ckpt")
        self._say(
            f"interrupted in epoch {self.epoch + 1} after step {self.step} of {len(self.train_data)}; "
            f"saved, continue with --resume {path}",
            file=sys.stderr,
        )
        return EXIT_INTERRUPTED

    def _say(self, text, file=None):
        if self.processes.rank == 0:
            print(text, file=file, flush=True)

    def _save(self, names):
        state = {
            "options": {name: getattr(self.args, name) for name in RUN_OPTIONS},
            "epoch": self.epoch,
            "step": self.step,
            "loss_sum": self.loss_sum,
            "history": self.history,
            "best": self.best,
            "random": random_state(),
        }
        paths = [os.path.join(self.args.save_dir, name) for name in names]
        with self.processes.together():  # the others wait until process 0 has written the checkpoint
            save_checkpoint(paths, self.net, self.trainer, state, self.processes)

    def _bar(self, text, total, initial=0):
        # disable=None: no bar if the output is not a terminal
        return tqdm(
            total=total,
            initial=initial,
            desc=text,
            unit="batch",
            leave=False,
            disable=True if self.processes.rank else None,
        )
