"""A training job with TensorFlow: tf.data over TFRecord files, with its own cache if asked for."""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf

from bench.jobs.training import READ_BYTES, Batch, batch_of, parser, shards, train


def main() -> None:
    arguments = parser().parse_args()
    paths = tf.constant(shards(arguments.data))

    def records(path: tf.Tensor) -> tf.data.Dataset:
        return tf.data.TFRecordDataset(path, buffer_size=READ_BYTES)

    files = tf.data.Dataset.from_tensor_slices(paths)
    files = files.shuffle(len(paths), seed=1, reshuffle_each_iteration=True)
    read = files.interleave(
        records,
        cycle_length=arguments.open_shards,
        num_parallel_calls=arguments.readers,
        deterministic=False,
    )
    if arguments.cache is not None:
        # Before the shuffle, as its documentation has it: the order must differ between epochs.
        read = read.cache(str(arguments.cache / "cache"))
    read = read.shuffle(arguments.shuffle, seed=2).batch(arguments.batch).prefetch(arguments.ahead)
    # Now and then it holds a whole pipeline up for a second, whatever that reads: of epochs of
    # 0.6 s every tenth took twice as long, also those of local files.
    options = tf.data.Options()
    options.autotune.enabled = False
    read = read.with_options(options)

    def epoch(_number: int) -> Iterator[Batch]:
        for batch in read:
            yield batch_of(batch.numpy().tolist())

    train(arguments.compute, epoch)


if __name__ == "__main__":
    main()
