"""GDSDataset over URLs: the rows of case=remote."""

import time

import gdsdata
from gdsdata import formats
from gdsdata.bench.peers.gdsdata.batches import TarBatches
from gdsdata.bench.peers.gdsdata.checkpoints import Dcp, Pt, Safetensors
from gdsdata.bench.peers.object_clients import RemotePeer
from gdsdata.bench.peers.protocols import BatchPeer, counted
from gdsdata.bench.peers.remote_checkpoints import Stored
from gdsdata.storage.secret import Keys

BATCH_BYTES, MOST_SAMPLES = 8 * 2**20, 256  # of a batch of pieces
MOST_OVERTIME_S = 20  # An epoch is read to its end, because what was read ahead would not count.


def storage_options(access):
    keys = Keys(access_key_id=access.access_key, secret_access_key=access.secret_key, session_token=access.token)
    own = {"endpoint_url": access.endpoint_url} if access.endpoint_url else {}
    return {**own, "region": access.region, "credentials": keys}


class RemotePieces(RemotePeer, serves="remote"):
    """Pieces are samples of a data set, which come in its own order."""

    key, name, tunes = "gdsdata", "gdsdata", False
    setting = "GDSDataset over the objects' URLs: fixed-size Records, shuffled uniformly; whole objects in order"
    shuffle: bool | str = True

    def open(self):
        self.datasets = {}  # by the length of a piece

    def dataset(self, length):
        if length not in self.datasets:
            self.datasets[length] = gdsdata.GDSDataset(
                self.objects.urls,
                batch_size=max(1, min(BATCH_BYTES // length, MOST_SAMPLES)),
                format=self.layout(length),
                shuffle=self.shuffle if length < min(self.objects.sizes) else False,
                device=self.device,
                sharding=gdsdata.Sharding(rank=0, world_size=1),
                reading=gdsdata.Reading(gdsdata.EngineOptions(**self.engine)),
                storage_options=storage_options(self.access),
            )
        return self.datasets[length]

    def layout(self, length):
        """Return the format of pieces; behind the last one an object may have more bytes."""
        if any(size % length for size in self.objects.sizes):
            return formats.Tokens("uint8", seq_len=length - 1, stride=length, raw=True)
        return formats.Records("uint8", (length,))

    def read(self, feed, take):
        """Read as many pieces as the feed has, or whole epochs for as long as it lasts."""
        lengths = {piece.length for piece in feed.pieces}
        if len(lengths) > 1:
            raise ValueError(f"a data set's samples are of one size, and these of {len(lengths)}")
        dataset, left = self.dataset(lengths.pop()), len(feed.pieces)
        while feed.ends or left > 0:
            for batch in dataset:
                for sample in (batch if batch.is_cuda else batch.numpy())[: None if feed.ends else left]:
                    take(None, sample)
                left -= len(batch)
                if time.perf_counter() > feed.ends + MOST_OVERTIME_S if feed.ends else left <= 0:
                    return
            if feed.ends and time.perf_counter() > feed.ends:
                return

    def served(self):
        return counted(*(dataset.stats() for dataset in self.datasets.values()))

    def close(self):
        self.datasets.clear()


class LanesOfPieces(RemotePieces, serves="remote"):
    key, name, kinds = "gdsdata_lanes", 'gdsdata, shuffle="lanes"', ("samples",)
    setting = 'GDSDataset over the objects\' URLs, fixed-size Records, shuffle="lanes": it reads large pieces'
    shuffle = "lanes"

    def served(self):
        return {}  # Its batches are counted as copies of what was read before.


class RemoteTars(TarBatches, serves="remote"):
    key, name, path = "gdsdata", "gdsdata", "remote"
    kinds: tuple[str, ...] = ("shards", "first_batch")
    setting = "GDSDataset over a glob of the tars' URLs with cache=; a batch is a view of its .npy files"
    knows_ids = False
    has_cache = True
    shuffle: bool | str = "auto"

    def layout(self):
        return formats.Tar()

    def reading(self):
        # "user" is in the cache, if there is one.
        return {"index_cache": "user" if self.has_cache else f"{self.source.cache_folder}-index"}

    def place(self):
        cache = self.source.cache_folder if self.has_cache else None
        more = {"cache": cache, "storage_options": storage_options(self.source.objects.access)}
        return f"{self.source.folder_url}/*.tar", more

    def expected_ids(self, epoch, batches):
        return BatchPeer.expected_ids(self, epoch, batches)


class StreamedTars(RemoteTars, serves="remote"):
    key, name, caches, has_cache = "gdsdata_streamed", "gdsdata, no cache", ("cold",), False
    setting = "GDSDataset over a glob of the tars' URLs; only the index is kept for the next start"


class UniformTars(RemoteTars, serves="remote"):
    """As the local files are shuffled: `"auto"` takes lanes for objects."""

    key, name, caches, shuffle = "gdsdata_uniform", "gdsdata, shuffle=True", ("warm",), True
    setting = "the same with shuffle=True"


class LocalTars(RemoteTars, serves="remote"):
    """The files that the tars were put from, as a second epoch from the cache may be at best."""

    key, name, caches, has_cache, path = "gdsdata_local", "gdsdata, local files", ("warm",), False, ""
    kinds = ("shards",)
    setting = "GDSDataset over the same tars as local files, for comparison"

    def place(self):
        return self.source.files, {}


class StoredPt(Stored, Pt, serves="remote"):
    setting = "gdsdata.save to, and gdsdata.load of, the URL of a .pt object"

    def load(self, into, path):
        return gdsdata.load(path, self.device, options=self.options)


class StoredSafetensors(StoredPt, Safetensors, serves="remote"):
    setting = "the same of a .safetensors object"


class StoredDcp(Stored, Dcp, serves="remote"):
    setting = f"{Dcp.setting}, over the URL of a folder"
    fills = True
