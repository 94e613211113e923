"""boto3 (that is botocore, which does its requests): a row of case=remote."""

from gdsdata.bench.peers.object_clients import ThreadsPeer
from gdsdata.bench.peers.registry import serves


@serves("remote")
class Boto3(ThreadsPeer):
    key, name, package = "boto3", "boto3", "botocore"
    setting = "get_object(Range=) of botocore's client, by threads that share it"

    def open(self):
        self.client = self.access.client(max_pool_connections=self.connections)

    def fetch(self, piece):
        return self.client.get_object(Bucket=self.access.bucket, Key=piece.key, Range=piece.range)["Body"].read()

    def close(self):
        self.client.close()
