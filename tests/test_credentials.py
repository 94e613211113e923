"""Credentials: where they are found, when they are renewed, and that nothing shows them."""

import contextlib
import datetime
import http.server
import json
import math
import os
import pickle
import pwd
import signal
import sys
import threading
import traceback

import pytest
from helpers import exit_code_of_fork

from gdsdata.storage import aws_chain, azure_chain, credentials, google_chain
from gdsdata.storage.secret import AccountKey, Anonymous, Keys, SharedAccess, Token
from gdsdata.storage.store import Access
from gdsdata.storage.stores import azure, gcs, s3, web

SECRET = "tHe/sEcReT+0123456789"
KINDS = [Keys("id", SECRET, SECRET), Token(SECRET), AccountKey(SECRET), SharedAccess(SECRET)]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch, tmp_path):
    """Unset each variable that names credentials, and hide this user's files."""
    for name in list(os.environ):
        if name.startswith(("AWS_", "AZURE_", "GOOGLE_", "GS_", "CLOUDSDK_", "STORAGE_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    aws_chain._botocore_credentials.cache_clear()


def without(monkeypatch, *packages):
    """Hide packages, as if they were not installed."""
    for name in packages:
        monkeypatch.setitem(sys.modules, name, None)


# ------------------------------------------------------------------------------------------- nothing shows them


@pytest.mark.parametrize("secret", KINDS, ids=lambda secret: type(secret).__name__)
def test_no_text_and_no_pickle_has_a_secret(secret):
    holder = credentials.Credentials(lambda: secret)
    holder.current()
    for one in (secret, holder):
        assert SECRET not in f"{one}{one!r}"
    for one in (secret, holder, {"a": secret}):
        with pytest.raises(TypeError, match="secrets are not pickled"):
            pickle.dumps(one)


@pytest.mark.parametrize(
    ("module", "scheme", "bucket", "given"),
    [
        (s3, "s3", "bucket", {"access_key_id": "id", "secret_access_key": SECRET}),
        (gcs, "gs", "bucket", {"token": SECRET}),
        (azure, "az", "container@account", {"account_key": "c2VjcmV0"}),
        (web, "https", "host", {"token": SECRET}),
    ],
    ids=["s3", "gs", "az", "https"],
)
def test_no_text_of_a_store_or_access_has_a_secret(monkeypatch, module, scheme, bucket, given):
    monkeypatch.setenv("AWS_REGION", "eu-west-1")
    store = module.make(bucket, scheme, {"credentials": given})
    access = store.access("key")
    assert isinstance(access, Access) and access.lifetime_s > 3600
    for text in (repr(store), str(store), repr(access)):
        assert SECRET not in text and "ignature" not in text and "sig=" not in text
    for one in (store, access):
        with pytest.raises(TypeError, match="secrets are not pickled"):
            pickle.dumps(one)


@pytest.mark.parametrize(
    "given",
    [
        {"access_key": SECRET},
        {"access_key_id": SECRET},
        {"access_key_id": "", "secret_access_key": SECRET},
        {"token": SECRET},
        SECRET,
        lambda: SECRET,
        lambda: {"secret": SECRET},
        Token(SECRET),
        {"access_key_id": "id", "secret_access_key": SECRET, "expires_at": datetime.datetime(2030, 1, 1)},
    ],
    ids=range(9),
)
def test_wrong_credentials_are_refused_without_showing_them(given):
    with pytest.raises(ValueError) as caught:
        credentials.given(given, [Keys], "s3").current()
    assert SECRET not in "".join(traceback.format_exception_only(caught.value))


def test_names_that_credentials_need_are_distinguished_from_optional_ones():
    with pytest.raises(ValueError, match=r"needs access_key_id, secret_access_key \(and may have session_token\)$"):
        credentials.given({"access_key": "a", "secret_key": SECRET}, [Keys], "s3")


# ------------------------------------------------------------------------------------------------------ renewal


class Clock:
    """Seconds since the epoch, which pass when a test says so. The wall clock may be wrong."""

    def __init__(self, monkeypatch):
        self.now, self.wrong_by = 1000.0, 0.0
        monkeypatch.setattr(credentials, "_now", lambda: self.now + self.wrong_by)
        monkeypatch.setattr(credentials, "steady_s", lambda: self.now)


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_a_secret_is_renewed_before_its_end(clock):
    made = []

    def fetch():
        made.append(Token(str(len(made)), expires_at=clock.now + 3600))
        return made[-1]

    holder = credentials.Credentials(fetch)
    assert [holder.current().token for _ in range(3)] == ["0", "0", "0"]
    clock.now += 2990  # ten minutes and some before the end
    assert holder.current().token == "0"
    clock.now += 20
    assert holder.current().token == "1"
    assert len(made) == 2


def test_a_secret_that_a_server_refuses_is_renewed_once(clock):
    made = []
    holder = credentials.Credentials(lambda: made.append(1) or Token(str(len(made))))
    assert holder.current().token == "1"
    clock.now += 100
    for _ in range(3):  # as many threads find out
        holder.distrust()
        assert holder.current().token == "2"


def test_a_refused_secret_that_had_ended_when_it_was_fetched_is_fetched_again_at_once(clock):
    ends = [-1.0, 3600.0]  # a file of keys that is about to be rewritten
    holder = credentials.Credentials(lambda: Token(str(len(ends)), expires_at=clock.now + ends.pop(0)))
    assert holder.current().token == "2"
    holder.distrust()
    assert holder.current().token == "1"


def test_a_secret_that_is_doubted_is_kept_until_there_is_a_newer_one(clock):
    answers = [Token("1"), OSError("no"), Token("2")]

    def fetch():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    holder = credentials.Credentials(fetch)
    assert holder.current().token == "1"
    signed_at = clock.now
    for _ in range(3):
        clock.now += 100
        holder.doubt(clock.now - signed_at)
        assert holder.current().token == ("1" if answers else "2")
        holder.doubt(0)  # at once again: nothing is fetched
        assert holder.current().token == ("1" if answers else "2")
    holder.doubt(clock.now - signed_at)
    assert holder.current().token == "2"


@pytest.mark.parametrize("wrong_by", [-7200, 7200])
def test_a_secret_is_renewed_before_its_end_if_the_clock_was_moved(clock, wrong_by):
    made = []

    def fetch():
        made.append(Token(str(len(made)), expires_at=clock.now + 3600))
        return made[-1]

    holder = credentials.Credentials(fetch)
    holder.current()
    clock.wrong_by = wrong_by
    assert holder.current().token == "0"
    clock.now += 3010
    assert holder.current().token == "1"


def test_a_refused_secret_is_renewed_if_the_clock_was_set_back(clock):
    made = []
    holder = credentials.Credentials(lambda: made.append(1) or Token(str(len(made))))
    holder.current()
    clock.now, clock.wrong_by = clock.now + 100, -7200
    holder.distrust()
    assert holder.current().token == "2"
    clock.now += 100
    holder.doubt(50)
    assert holder.current().token == "3"


def test_a_clock_that_is_hours_ahead_does_not_fetch_at_each_request(clock):
    made = []
    clock.wrong_by = 7200

    def fetch():
        made.append(Token(str(len(made)), expires_at=clock.now + 3600))
        return made[-1]

    holder = credentials.Credentials(fetch)
    assert [holder.current().token for _ in range(3)] == ["0", "0", "0"]
    clock.now += 6
    assert holder.current().token == "1"


def test_a_secret_without_end_is_fetched_once(clock):
    made = []
    holder = credentials.Credentials(lambda: made.append(1) or Anonymous())
    for _ in range(3):
        holder.current()
        clock.now += 1e9
    assert made == [1]


def test_the_old_secret_is_used_while_its_renewal_fails(clock):
    answers = [Token("old", expires_at=clock.now + 1000), OSError("no"), OSError("no"), Token("new")]

    def fetch():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    holder = credentials.Credentials(fetch)
    assert holder.current().token == "old"
    clock.now += 800
    assert holder.current().token == "old" and len(answers) == 2
    assert holder.current().token == "old" and len(answers) == 2  # the next try has its pause
    clock.now += 195  # nearly over: nothing more is signed with it
    with pytest.raises(OSError):
        holder.current()
    assert holder.current().token == "new"


def test_threads_use_the_old_secret_while_one_renews(clock):
    renewing, go_on = threading.Event(), threading.Event()
    made = []

    def fetch():
        if made:
            renewing.set()
            assert go_on.wait(20)
        made.append(Token(str(len(made)), expires_at=clock.now + 1000))
        return made[-1]

    holder = credentials.Credentials(fetch)
    holder.current()
    clock.now += 800
    renewed = []
    thread = threading.Thread(target=lambda: renewed.append(holder.current().token))
    thread.start()
    assert renewing.wait(20)
    assert [holder.current().token for _ in range(10)] == ["0"] * 10  # none of them waits
    go_on.set()
    thread.join(20)
    assert (renewed, holder.current().token, len(made)) == (["1"], "1", 2)


def test_threads_that_find_none_wait_for_one_renewal(clock):
    made = []
    inside = threading.Semaphore(0)

    def fetch():
        inside.acquire(timeout=20)
        made.append(Token("only", expires_at=clock.now + 1000))
        return made[-1]

    holder = credentials.Credentials(fetch)
    tokens = []
    threads = [threading.Thread(target=lambda: tokens.append(holder.current().token)) for _ in range(16)]
    for thread in threads:
        thread.start()
    inside.release()
    for thread in threads:
        thread.join(20)
    assert (len(made), tokens) == (1, ["only"] * 16)


def test_a_fork_during_a_renewal_does_not_block_the_child(clock):
    renewing, go_on = threading.Event(), threading.Event()

    def fetch():
        renewing.set()
        go_on.wait(20)
        return Token("token")

    holder = credentials.Credentials(fetch)
    thread = threading.Thread(target=holder.current)
    thread.start()
    assert renewing.wait(20)

    def child():
        go_on.set()
        signal.alarm(10)
        assert holder.current().token == "token"

    assert exit_code_of_fork(child) == 0
    go_on.set()
    thread.join(20)


def test_a_function_of_ones_own_is_called_again_before_the_end(clock):
    ends = datetime.datetime.fromtimestamp(clock.now + 1000, datetime.timezone.utc)
    calls = []

    def mine():
        calls.append(1)
        return {"access_key_id": f"id{len(calls)}", "secret_access_key": "s", "expires_at": ends}

    holder = credentials.given(mine, [Keys], "s3")
    assert (holder.current().access_key_id, holder.current().expires_at) == ("id1", clock.now + 1000)
    clock.now += 800
    assert holder.current().access_key_id == "id2"


@pytest.mark.parametrize(
    ("value", "expected"),
    [(None, math.inf), ("", math.inf), (5, 5.0), ("1970-01-01T00:01:00Z", 60.0), ("1970-01-01T01:00:00+01:00", 0.0)],
)
def test_an_end_has_any_usual_form(value, expected):
    assert credentials.end_of(value) == expected


@pytest.mark.parametrize(
    ("said", "why"), [("tomorrow", "'tomorrow' is no time"), ("2031-01-31T12:00:00", "no time zone")]
)
def test_an_end_that_is_no_time_is_named_with_what_has_it(monkeypatch, said, why):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    monkeypatch.setenv("AWS_CREDENTIAL_EXPIRATION", said)
    with pytest.raises(ValueError, match=f"^AWS_CREDENTIAL_EXPIRATION: .*{why}.*: write it as 20"):
        aws_chain.find_keys(None, "s3://bucket")


# ---------------------------------------------------------------------------------------------------------- AWS


def write(tmp_path, config="", secrets=""):
    (tmp_path / "config").write_text(config)
    (tmp_path / "credentials").write_text(secrets)


def test_keys_of_the_environment_serve_a_user_without_a_home_folder(monkeypatch):
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE", "HOME"):
        monkeypatch.delenv(name)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)  # as in a container whose /etc/passwd lacks the user
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    assert not aws_chain.read_profile().values
    assert found() == ("a", "b", "")


def found(profile=None):
    keys = aws_chain.find_keys(profile, "s3://bucket")
    return keys.access_key_id, keys.secret_access_key, keys.session_token


def test_keys_of_the_environment_go_first(monkeypatch, tmp_path):
    write(tmp_path, secrets="[default]\naws_access_key_id = file\naws_secret_access_key = s\n")
    assert found() == ("file", "s", "")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "env")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "token")
    assert found() == ("env", "secret", "token")
    assert found("default") == ("file", "s", "")  # a profile that is named goes before


def test_temporary_keys_of_a_file_are_read_again(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(aws_chain.time, "time", lambda: clock.now)
    text = "[default]\naws_access_key_id = {}\naws_secret_access_key = s\naws_session_token = t\n"
    write(tmp_path, secrets=text.format("first"))
    holder = credentials.Credentials(lambda: aws_chain.find_keys(None, "s3://bucket"))
    assert holder.current().access_key_id == "first"
    write(tmp_path, secrets=text.format("second"))  # another program renews them
    assert holder.current().access_key_id == "first"
    clock.now += 800
    assert holder.current().access_key_id == "second"


def test_profiles_are_read_from_both_files(monkeypatch, tmp_path):
    write(
        tmp_path,
        "[profile one]\nregion = eu-central-1\naws_access_key_id = config\naws_secret_access_key = c\n"
        "endpoint_url = https://one.example\n[profile two]\nservices = local\n"
        "[services local]\ns3 =\n  endpoint_url = http://two.example\n",
        "[one]\naws_access_key_id = file\naws_secret_access_key = f%s\naws_session_token = t\n",
    )
    monkeypatch.setenv("AWS_PROFILE", "one")
    assert found() == ("file", "f%s", "t")
    profile = aws_chain.read_profile()
    assert aws_chain.region_of(profile) == "eu-central-1"
    assert aws_chain.endpoint_of(profile)[0] == "https://one.example"
    assert aws_chain.endpoint_of(aws_chain.read_profile("two"))[0] == "http://two.example"
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://all.example")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "https://s3.example")
    assert aws_chain.region_of(profile) == "us-west-2"
    assert aws_chain.endpoint_of(profile) == ("https://s3.example", "AWS_ENDPOINT_URL_S3")
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "true")
    assert aws_chain.endpoint_of(profile) == ("", "")
    assert "f%s" not in repr(profile)


@pytest.mark.parametrize("name", ["'my prof'", '"my prof"', "  my\\ prof", "\t'my prof'", "my prof"])
def test_names_of_sections_are_quoted_and_spaced_as_awss_tools_write_them(monkeypatch, tmp_path, name):
    write(
        tmp_path, f"[profile {name}]\nservices = local\n[services  'local']\ns3 =\n  endpoint_url = http://s.example\n"
    )
    monkeypatch.setenv("AWS_PROFILE", "my prof")
    assert aws_chain.endpoint_of(aws_chain.read_profile())[0] == "http://s.example"


def test_a_profile_says_whether_the_bucket_is_in_the_hosts_name(monkeypatch, tmp_path):
    """Some services, such as Alibaba's and Tencent's, refuse buckets in the path."""
    text = "[default]\nregion = r\ns3 =\n    max_queue_size = 10\n    addressing_style = {}\n"
    options = {"endpoint_url": "https://h", "credentials": "anonymous"}
    for style, url in (
        ("virtual", "https://bucket.h/k"),
        ("path", "https://h/bucket/k"),
        ("auto", "https://h/bucket/k"),
    ):
        write(tmp_path, text.format(style))
        assert s3.make("bucket", "s3", options).address("k") == url
    assert s3.make("bucket", "s3", {**options, "addressing": "virtual"}).address("k") == "https://bucket.h/k"
    write(tmp_path, text.format("upside-down"))
    with pytest.raises(ValueError, match="addressing_style of the profile default='upside-down': choose 'auto'"):
        s3.make("bucket", "s3", options)


def test_a_profile_may_ignore_configured_endpoints_unless_the_environment_says_otherwise(monkeypatch, tmp_path):
    write(tmp_path, "[default]\nendpoint_url = http://one.example\nignore_configured_endpoint_urls = true\n")
    profile = aws_chain.read_profile()
    assert aws_chain.endpoint_of(profile) == ("", "")
    monkeypatch.setenv("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS", "false")
    assert aws_chain.endpoint_of(profile)[0] == "http://one.example"


def test_a_profile_that_is_named_must_exist(monkeypatch):
    monkeypatch.setenv("AWS_PROFILE", "nowhere")
    with pytest.raises(ValueError, match="no AWS profile 'nowhere'"):
        s3.make("bucket", "s3", {})


def test_a_damaged_file_is_named_but_not_quoted(tmp_path):
    write(tmp_path, secrets=f"aws_secret_access_key = {SECRET}\n")
    with pytest.raises(ValueError, match="credentials: is no file of AWS settings") as caught:
        found()
    assert SECRET not in str(caught.value) and caught.value.__suppress_context__


def test_a_credential_process_is_run(tmp_path):
    said = {
        "Version": 1,
        "AccessKeyId": "made",
        "SecretAccessKey": "s",
        "SessionToken": "t",
        "Expiration": "2040-01-01T00:00:00Z",
    }
    (tmp_path / "said.json").write_text(json.dumps(said))
    write(tmp_path, f"[default]\ncredential_process = cat '{tmp_path / 'said.json'}'\n")
    keys = aws_chain.find_keys(None, "s3://bucket")
    assert (keys.access_key_id, keys.session_token) == ("made", "t")
    assert keys.expires_at == datetime.datetime(2040, 1, 1, tzinfo=datetime.timezone.utc).timestamp()


@pytest.mark.parametrize("command", [f"echo {SECRET}", "false", "/nowhere/program", 'echo "[1]"'])
def test_a_credential_process_that_fails_is_named(tmp_path, command):
    write(tmp_path, f"[default]\ncredential_process = {command}\n")
    with pytest.raises(PermissionError, match="credential_process of the AWS profile default") as caught:
        found()
    assert SECRET not in str(caught.value) and caught.value.__suppress_context__


def test_a_role_is_for_botocore(monkeypatch, tmp_path):
    write(
        tmp_path,
        "[default]\nrole_arn = arn:aws:iam::1:role/r\nsource_profile = base\n"
        "aws_access_key_id = not\naws_secret_access_key = these\n",
    )
    without(monkeypatch, "botocore.session")
    with pytest.raises(PermissionError, match=r'pip install "gdsdata\[s3\]"'):
        found()


def test_botocore_is_asked_last(monkeypatch):
    session = pytest.importorskip("botocore.session", reason="botocore is not installed")

    class Session:
        def __init__(self, profile):
            assert profile is None

        def get_credentials(self):
            from botocore.credentials import Credentials

            return Credentials("boto", "s", "t")

    monkeypatch.setattr(session, "Session", Session)
    assert found() == ("boto", "s", "t")


def test_a_fork_while_botocore_renews_keys_does_not_block_the_child(monkeypatch):
    pytest.importorskip("botocore.session", reason="botocore is not installed")
    renewing, go_on, is_slow = threading.Event(), threading.Event(), threading.Event()

    class Endpoint(http.server.BaseHTTPRequestHandler):
        """The endpoint of a container: its keys end so soon that each use of them renews them."""

        def do_GET(self):
            if is_slow.is_set():
                is_slow.clear()  # for one request
                renewing.set()
                go_on.wait(20)
            ends = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=60)
            keys = {"AccessKeyId": "id", "SecretAccessKey": "s", "Token": "t", "Expiration": ends.isoformat()}
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # botocore has asked once more
                self.wfile.write(json.dumps(keys).encode())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"http://127.0.0.1:{server.server_port}/keys")
        assert found() == ("id", "s", "t")
        is_slow.set()
        thread = threading.Thread(target=found)
        thread.start()
        assert renewing.wait(20)

        def child():
            assert found() == ("id", "s", "t")

        assert exit_code_of_fork(child) == 0
        go_on.set()
        thread.join(20)
        server.shutdown()
    aws_chain._botocore_credentials.cache_clear()


@pytest.mark.parametrize(
    ("find", "packages", "names"),
    [
        (lambda url: aws_chain.find_keys(None, url), ["botocore.session"], ["AWS_ACCESS_KEY_ID", "gdsdata[s3]"]),
        (google_chain.find_secret, ["google.auth"], ["GS_ACCESS_KEY_ID", "gdsdata[gcs]"]),
        (azure_chain.find_secret, ["azure.identity"], ["AZURE_STORAGE_SAS_TOKEN", "gdsdata[azure]"]),
    ],
    ids=["s3", "gs", "az"],
)
def test_no_credentials_at_all_name_variables_and_extra(monkeypatch, find, packages, names):
    without(monkeypatch, *packages)
    with pytest.raises(PermissionError) as caught:
        find("xx://bucket")
    for name in [*names, "xx://bucket", 'credentials="anonymous"']:
        assert name in str(caught.value)


# ---------------------------------------------------------------------------------------------- Google and Azure


def test_google_s_variables(monkeypatch):
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "127.0.0.1:1")
    assert isinstance(google_chain.find_secret(""), Anonymous)
    monkeypatch.setenv("CLOUDSDK_AUTH_ACCESS_TOKEN", "token")
    assert google_chain.find_secret("").token == "token"
    monkeypatch.setenv("GS_ACCESS_KEY_ID", "id")
    monkeypatch.setenv("GS_SECRET_ACCESS_KEY", "secret")
    assert google_chain.find_secret("").access_key_id == "id"


def test_azure_s_variables(monkeypatch):
    monkeypatch.setenv(
        "AZURE_STORAGE_CONNECTION_STRING", "AccountName=acc1;AccountKey=a2V5PT0=;BlobEndpoint=http://127.0.0.1:1/acc1"
    )
    assert azure_chain.find_secret("").account_key == "a2V5PT0="
    assert azure.make("container", "az", {}).access("key").url.startswith("http://127.0.0.1:1/acc1/container/key?")
    monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", "?sv=1&sig=2")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT", "acc2")
    monkeypatch.delenv("AZURE_STORAGE_CONNECTION_STRING")
    url = azure.make("container", "az", {}).access("key").url
    assert url == "https://acc2.blob.core.windows.net/container/key?sv=1&sig=2"


def test_google_auth_and_azure_identity_are_asked(monkeypatch):
    google_auth = pytest.importorskip("google.auth", reason="google-auth is not installed")
    identity = pytest.importorskip("azure.identity", reason="azure-identity is not installed")

    class Google:
        token, expiry = None, None

        def refresh(self, request):
            self.token = "google"
            self.expiry = datetime.datetime(2040, 1, 1)  # in UTC, without a zone

    class Azure:
        def get_token(self, scope):
            assert scope == "https://storage.azure.com/.default"
            return type("AccessToken", (), {"token": "azure", "expires_on": 7})

    monkeypatch.setattr(google_chain, "_found", None)
    monkeypatch.setattr(azure_chain, "_found", None)
    monkeypatch.setattr(google_auth, "default", lambda scopes, request: (Google(), "project"))
    monkeypatch.setattr(identity, "DefaultAzureCredential", Azure)
    token = google_chain.find_secret("gs://bucket")
    assert token.token == "google"
    assert token.expires_at == datetime.datetime(2040, 1, 1, tzinfo=datetime.timezone.utc).timestamp()
    assert (azure_chain.find_secret("az://c").token, azure_chain.find_secret("az://c").expires_at) == ("azure", 7.0)
