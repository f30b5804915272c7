"""Which URLs and addresses may be fetched."""

from __future__ import annotations

import ipaddress

import pytest

from batchline.errors import BadRequest, UsageError
from batchline.media.addresses import MAX_LOGGED_HOSTS, FetchRules, is_internal, is_public

NOT_PUBLIC = """
    0.0.0.0 0.1.2.3 10.0.0.1 10.255.255.255 100.64.0.1 100.100.100.200 100.127.255.255 127.0.0.1 127.1.2.3
    168.63.129.16 169.254.169.254 169.254.170.2 172.16.0.1 172.31.255.255 192.0.0.1 192.0.0.192 192.0.2.1
    192.88.99.1 192.168.0.1 198.18.0.1 198.19.255.255 198.51.100.1 203.0.113.1 224.0.0.1 239.255.255.255
    240.0.0.1 255.255.255.255
    :: ::1 ::127.0.0.1 ::8.8.8.8 ::ffff:127.0.0.1 ::ffff:10.0.0.1 ::ffff:169.254.169.254 ::ffff:8.8.8.8
    ::ffff:0:127.0.0.1 64:ff9b::7f00:1 64:ff9b::a9fe:a9fe 64:ff9b:1::a00:1 100::1 2001::1 2001:0:7f00:1::
    2001:10::1 2001:20::1 2001:db8::1 2002:7f00:1:: 2002:a9fe:a9fe:: 2002:808:808:: 3fff::1 5f00::1
    fc00::1 fd00:ec2::254 fe80::1 fe80::a9fe:a9fe fec0::1 ff02::1 ff0e::1
"""

PUBLIC = ["1.1.1.1", "8.8.8.8", "93.184.215.14", "151.101.1.69", "2606:4700:4700::1111", "2a00:1450:4001:82f::200e"]

REFUSED_URLS = [
    "http://2130706433/",
    "http://017700000001/",
    "http://0x7f000001/",
    "http://0x7f.1/",
    "http://0177.0.0.1/",
    "http://127.1/",
    "http://127.0.1/",
    "http://127.0.0.1.:80/",
    "http://134744072/",
    "http://1.2.3.4.5/",
    "http://localhost.0x7f000001/",
    "http://[::1]/",
    "http://[::ffff:127.0.0.1]/",
    "http://[::ffff:a9fe:a9fe]/",
    "http://[fe80::1%25eth0]/",
    "http://[2606:4700:4700::1111%25eth0]/",
    "http://169.254.169.254/latest/meta-data/",
    "http://user@example.com/",
    "http://user:password@example.com/",
    "http://@example.com/",
    "http://:@example.com/",
    "http://example.com@127.0.0.1/",
    "http://example.com:80@127.0.0.1/",
    "http://example.com\\@127.0.0.1/",
    "http:\\\\127.0.0.1/",
    "http://127.0.0.1\\.example.com/",
    "http://example.com/a b",
    "http://example.com/\tb",
    "http://exam\nple.com/",
    "http://example.com/\x00",
    "http://example.com/\x7f",
    " http://example.com/",
    "http://example.com:99999/",
    "http://example.com:0/",
    "http://example.com:port/",
    "http:///path",
    "http://",
    "http:example.com",
    "//example.com/a.png",
    "ftp://example.com/a.png",
    "gopher://example.com/",
    "file:///etc/passwd",
    "javascript:alert(1)",
    "http://exa%6dple.com%2f@127.0.0.1/",
    "http://127.0.0.1%2f.example.com/",
    "http://１２７.0.0.1/",
    "http://①②⑦.⓪.⓪.①/",
    "http://127。0。0。1/",
    "http://[127.0.0.1]/",
    "http://[::1/",
    "http://example.com/" + "a" * 8192,
]


@pytest.mark.parametrize("address", NOT_PUBLIC.split())
def test_an_address_that_is_not_of_the_public_internet_is_refused(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))
    assert not FetchRules().is_allowed(address)


@pytest.mark.parametrize("address", PUBLIC)
def test_a_public_address_is_allowed(address: str) -> None:
    assert FetchRules().is_allowed(address)


@pytest.mark.parametrize("url", REFUSED_URLS)
def test_a_url_that_is_not_plain_http_to_a_public_host_is_refused(url: str) -> None:
    with pytest.raises(BadRequest) as refused:
        FetchRules().checked_url(url)
    assert "password@" not in refused.value.message


@pytest.mark.parametrize(
    "url",
    [
        "http://example.com",
        "https://example.com:8443/a/b.png?x=1&y=%2F#part",
        "HTTPS://EXAMPLE.com/ä ".strip(),
        "http://bücher.example/cover.jpg",
        "http://8.8.8.8/a.png",
        "http://[2606:4700:4700::1111]/a.png",
        "http://under_score.example.com./a.png",
        "http://3com.example/a.png",
    ],
)
def test_an_ordinary_url_is_allowed(url: str) -> None:
    assert FetchRules().checked_url(url).host


def test_a_network_that_the_operator_names_is_allowed_and_no_other() -> None:
    rules = FetchRules(networks=["10.1.0.0/16", "fd00:1::/32"])
    assert rules.is_allowed("10.1.2.3")
    assert rules.is_allowed("fd00:1::5")
    assert not rules.is_allowed("10.2.0.1")
    assert not rules.is_allowed("127.0.0.1")
    assert rules.checked_url("http://10.1.2.3/a.png").host == "10.1.2.3"


def test_a_network_that_is_none_is_the_operators_mistake() -> None:
    with pytest.raises(UsageError, match=r"--allowed-media-networks: 'intranet' is not a network"):
        FetchRules(networks=["intranet"])


@pytest.mark.parametrize("host", ["example.com", "EXAMPLE.COM", "example.com.", "cdn.images.example.org"])
def test_a_host_that_the_operator_names_is_allowed(host: str) -> None:
    rules = FetchRules(domains=["Example.com", "*.example.org"])
    assert rules.checked_url(f"http://{host}/a.png").host


@pytest.mark.parametrize(
    "host", ["example.org", "www.example.com", "example.com.evil.net", "evilexample.com", "8.8.8.8"]
)
def test_a_host_that_the_operator_does_not_name_is_refused(host: str) -> None:
    rules = FetchRules(domains=["example.com", "*.example.org"])
    with pytest.raises(BadRequest, match=r"--allowed-media-domains"):
        rules.checked_url(f"http://{host}/a.png")


@pytest.mark.parametrize(
    ("domain", "url"),
    [
        ("bücher.de", "http://bücher.de/a.png"),
        ("BÜCHER.de", "http://xn--bcher-kva.de/a.png"),
        ("*.bücher.de", "http://www.bücher.de/a.png"),
        ("8.8.8.8", "http://8.8.8.8/a.png"),
        ("[2606:4700:0::1111]", "http://[2606:4700::1111]/a.png"),
        ("my_bucket.example.com", "http://my_bucket.example.com/a.png"),
    ],
)
def test_a_host_is_allowed_however_its_name_is_written(domain: str, url: str) -> None:
    """Names with other letters than ASCII never matched, since URLs have them encoded."""
    assert FetchRules(domains=[domain]).checked_url(url)


@pytest.mark.parametrize(
    "domain",
    [
        *("", "*", "*.", "a.*.com", "*example.com", "example.com:8080", "https://example.com", "example.com/images"),
        *("user@example.com", "exa mple.com", "2130706433", "0x7f.1", "*.10.0.0.1", "10.0.0.0/8", "..."),
    ],
)
def test_a_domain_that_no_url_can_have_is_the_operators_mistake(domain: str) -> None:
    """It was accepted, and then every URL was refused."""
    with pytest.raises(UsageError, match=r"--allowed-media-domains: .* is not a host such as example.com"):
        FetchRules(domains=[domain])


def test_the_word_none_allows_no_host() -> None:
    """A host of this name was fetched from."""
    for host in ("example.com", "none"):
        with pytest.raises(BadRequest, match="this server fetches no URLs"):
            FetchRules(domains=["none"]).checked_url(f"http://{host}/a.png")
    with pytest.raises(UsageError, match="no other host with it"):
        FetchRules(domains=["none", "example.com"])


def test_a_refused_host_is_not_told_whether_it_exists() -> None:
    """A literal address gets the reason that a name without a public address gets."""
    with pytest.raises(BadRequest, match=r"^its host does not exist, or has no public address and is not in"):
        FetchRules().checked_url("http://10.0.0.1/a.png")


def test_the_log_names_each_refused_host_once_and_only_the_first_ones(caplog: pytest.LogCaptureFixture) -> None:
    rules = FetchRules()
    for number in [1, 1, *range(MAX_LOGGED_HOSTS + 5)]:
        with pytest.raises(BadRequest):
            rules.checked_url(f"http://10.0.0.{number}/a.png")
    assert len(caplog.messages) == MAX_LOGGED_HOSTS
    assert sum("10.0.0.1:" in message for message in caplog.messages) == 1
    assert caplog.messages[-1].endswith("further hosts are not logged")


@pytest.mark.parametrize("host", ["127.0.0.1", "10.1.2.3", "::1", "localhost", "LOCALHOST."])
def test_hosts_that_a_run_refuses_by_default_are_known_without_a_look_up(host: str) -> None:
    assert is_internal(host)


@pytest.mark.parametrize("host", ["8.8.8.8", "example.com", "2606:4700:4700::1111"])
def test_other_hosts_may_be_public(host: str) -> None:
    assert not is_internal(host)
