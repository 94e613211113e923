"""The S3 client of the AWS Common Runtime (aws-c-s3): a row of case=remote."""

import os
import threading

from gdsdata.bench.peers.object_clients import RemotePeer
from gdsdata.bench.peers.registry import serves

TARGET_GBIT_PER_S = 100.0  # its default of 10 bounds its connections


@serves("remote")
class AwsCrt(RemotePeer):
    key, name, package = "awscrt", "awscrt S3 client", "awscrt"
    setting = f"awscrt.s3.S3Client, throughput_target_gbps={TARGET_GBIT_PER_S:g}, a request a piece, into a bytearray"

    def open(self):
        from awscrt import auth, io, s3

        secure = self.access.endpoint_url.partition("://")[0] != "http"
        threads = io.EventLoopGroup(len(os.sched_getaffinity(0)))
        access = self.access
        credentials = auth.AwsCredentialsProvider.new_static(access.access_key, access.secret_key, access.token or None)
        signing = s3.create_default_s3_signing_config(region=access.region, credential_provider=credentials)
        self.client = s3.S3Client(
            bootstrap=io.ClientBootstrap(threads, io.DefaultHostResolver(threads)), region=access.region,
            tls_mode=None if secure else s3.S3RequestTlsMode.DISABLED, signing_config=signing,
            throughput_target_gbps=TARGET_GBIT_PER_S,
        )  # fmt: skip

    def request(self, piece):
        from awscrt import http

        host, path = f"{self.access.bucket}.s3.{self.access.region}.amazonaws.com", f"/{piece.key}"
        if self.access.endpoint_url:
            host, path = self.access.endpoint_url.partition("://")[2], f"/{self.access.bucket}/{piece.key}"
        return http.HttpRequest("GET", path, http.HttpHeaders([("Host", host), ("Range", piece.range)]))

    def read(self, feed, take):
        free = threading.Semaphore(self.connections)
        errors: list[Exception] = []
        under_way = {}
        for place, piece in feed:
            free.acquire()
            if errors:
                break
            under_way[place] = self.begin(place, piece, take, free, errors)
            under_way.pop(place - 4 * self.connections, None)
        for _ in range(self.connections):
            free.acquire()
        if errors:
            raise errors[0]

    def begin(self, place, piece, take, free, errors):
        from awscrt import s3

        memory = bytearray(piece.length)

        def on_body(chunk, offset, **_):
            memory[offset - piece.offset : offset - piece.offset + len(chunk)] = chunk

        def on_done(error=None, status_code=None, **_):
            try:
                if error:
                    raise OSError(f"{error}, status {status_code}")
                take(place, memory)
            except Exception as reason:
                errors.append(reason)
            finally:
                free.release()

        return self.client.make_request(
            type=s3.S3RequestType.GET_OBJECT, request=self.request(piece), on_body=on_body, on_done=on_done
        )

    def close(self):
        del self.client
