"""Jobs with the lines that docs/USAGE.md gives to users of loaders.

Each defines ``epochs_of(files, count)``: the numbers of the files, in the order in which they were
read, of each epoch. `PRELUDE` has what all share, `COMMON` what those of a framework do.
"""

PRELUDE = """
import json, random, sys
from monarchfs import hints

size, plain, mounted, count = json.loads(sys.stdin.readline())

def number(data):
    "Of which file it is the content; -1 if of none."
    data = bytes(data)
    return int.from_bytes(data[:4], "big") if data == data[:4] * (size // 4) else -1
"""

MAIN = """
print(json.dumps([epochs_of(plain, 1), epochs_of(mounted, count)]))
"""

TORCH = """
import torch
from torch.utils.data import (
    DataLoader, Dataset, DistributedSampler, IterableDataset, RandomSampler,
    get_worker_info,
)

def read(path):
    with open(path, "rb") as file:
        return number(file.read())

class Files(Dataset):
    def __init__(self, files):
        self.files = files
    def __len__(self):
        return len(self.files)
    def __getitem__(self, index):
        return read(self.files[index])

def numbers(loader):
    return [int(number) for batch in loader for number in batch]
"""

SAMPLER = """
def drawn(files, count, announced):
    torch.manual_seed(0)
    dataset = Files(files)
    sampler = RandomSampler(dataset)
    if announced:
        sampler = hints.announce(sampler, files)
    loader = DataLoader(dataset, sampler=sampler, batch_size=16, num_workers=4)
    return [numbers(loader) for _ in range(count)]

def epochs_of(files, count):
    result = drawn(files, count, True)
    assert result == drawn(plain, count, False), "not what is drawn without hints"
    return result
"""

DISTRIBUTED = """
from multiprocessing import Barrier, Pipe, Process

def rank(number, files, count, barrier, pipe):
    dataset = Files(files)
    sampler = hints.announce(DistributedSampler(dataset, 2, number), files)
    loader = DataLoader(dataset, sampler=sampler, batch_size=16, num_workers=2)
    for epoch in range(count):
        sampler.set_epoch(epoch)
        barrier.wait()
        pipe.send(numbers(loader))

def epochs_of(files, count):
    barrier, pipes = Barrier(2), [Pipe() for _ in range(2)]
    ranks = [Process(target=rank, args=(n, files, count, barrier, pipes[n][1])) for n in range(2)]
    for process in ranks:
        process.start()
    result = [pipes[0][0].recv() + pipes[1][0].recv() for _ in range(count)]
    for process in ranks:
        process.join()
    assert count == 1 or result[0] != result[1], "set_epoch did not reach the sampler"
    return result
"""

ITERABLE = """
class Shuffled(IterableDataset):
    def __init__(self, files, epoch):
        self.files, self.epoch = files, epoch
    def __iter__(self):
        worker = get_worker_info()
        drawn = random.Random(self.epoch).sample(self.files, len(self.files))
        mine = drawn[worker.id :: worker.num_workers]
        hints.announce_files(mine)
        yield from map(read, mine)

def epochs_of(files, count):
    return [
        numbers(DataLoader(Shuffled(files, epoch), batch_size=16, num_workers=4))
        for epoch in range(count)
    ]
"""

SHARDS = """
import webdataset

def epochs_of(files, count):
    result = []
    for epoch in range(count):
        random.Random(epoch).shuffle(files)
        hints.announce_files(files)
        dataset = webdataset.WebDataset(files, shardshuffle=False).shuffle(50)
        dataset = dataset.to_tuple("bin").map_tuple(number)
        loader = DataLoader(dataset, batch_size=16, num_workers=4)
        result.append([int(number) for batch, in loader for number in batch])
    return result
"""

TENSORFLOW = """
import tensorflow as tf

def names_of(files):
    def order():
        drawn = random.sample(files, len(files))
        hints.announce_files(drawn)
        yield drawn
    names = tf.data.Dataset.from_generator(order, output_signature=tf.TensorSpec([None], tf.string))
    return names.unbatch()

def numbers(dataset):
    return [number(data) for batch in dataset.batch(16).prefetch(2) for data in batch.numpy()]
"""

MAP = """
def epochs_of(files, count):
    dataset = names_of(files).map(tf.io.read_file, num_parallel_calls=8)
    return [numbers(dataset) for _ in range(count)]
"""

INTERLEAVE = """
def records(name):
    return tf.data.FixedLengthRecordDataset(name, size)

def epochs_of(files, count):
    dataset = names_of(files).interleave(records, cycle_length=8, num_parallel_calls=4).shuffle(50)
    return [numbers(dataset) for _ in range(count)]
"""

DALI = """
import numpy
from nvidia.dali import fn, pipeline_def, types

BATCH = 20

def numbers(pipe, files):
    "Of one epoch."
    return [number(data) for _ in range(len(files) // BATCH) for data in pipe.run()[0]]
"""

READER = """
@pipeline_def(batch_size=BATCH, num_threads=4, device_id=None)
def pipeline(files):
    data, label = fn.readers.file(files=files)
    return data, label

def epochs_of(files, count):
    random.shuffle(files)
    pipe = pipeline(files)
    result = []
    for _ in range(count):
        hints.announce_files(files)
        result.append(numbers(pipe, files))
    return result
"""

SHUFFLING_READER = """
@pipeline_def(batch_size=BATCH, num_threads=4, device_id=None)
def pipeline(files):
    data, label = fn.readers.file(files=files, random_shuffle=True, initial_fill=40)
    return data, label

def epochs_of(files, count):
    pipe = pipeline(files)
    return [numbers(pipe, files) for _ in range(count)]
"""

FILE_READ = """
def epochs_of(files, count):
    def order():
        drawn = random.sample(files, len(files))
        hints.announce_files(drawn)
        for name in drawn:
            yield numpy.frombuffer(name.encode(), numpy.uint8)

    @pipeline_def(batch_size=BATCH, num_threads=4, device_id=None)
    def pipeline():
        names = fn.external_source(order, batch=False, cycle="raise", dtype=types.UINT8, ndim=1)
        return fn.io.file.read(names)

    pipe = pipeline()
    result = []
    for _ in range(count):
        result.append(numbers(pipe, files))
        try:
            pipe.run()
        except StopIteration:
            pipe.reset()
    return result
"""

COMMON = {"torch": TORCH, "webdataset": TORCH, "tensorflow": TENSORFLOW, "nvidia.dali": DALI}
