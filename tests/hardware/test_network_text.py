import pytest

from phaze.errors import HardwareError, UnknownNameError
from phaze.hardware import Links, network, parse_cluster

RINGS, LINES = Links.RING, Links.LINE


def levels(text: str) -> list[tuple[int, float]]:
    return [(level.size, level.bandwidth_bytes_per_s / 1e9) for level in parse_cluster(text).levels]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("h100:512@nvlink8+ib400", [(8, 450), (64, 50)]),
        ("h100:512@nvlink8+ndr", [(8, 450), (64, 50)]),
        ("h100:4@nvlink8+ib400", [(4, 450)]),
        ("h100:64@ib200", [(64, 25)]),
        ("gb200:576@nvlink72+ib800", [(72, 900), (8, 100)]),
        ("h100:512@nvlink8+ib400/2", [(8, 450), (64, 25)]),
        ("h100:512@nvlink8*0.5+ib400*0.9", [(8, 225), (64, 45)]),
        ("h100:512@nvlink8+4xib200", [(8, 450), (64, 12.5)]),
        ("h100:1024@nvlink8+ib400x32+ib400/4", [(8, 450), (32, 50), (4, 12.5)]),
        ("tpuv4-paper:64@nvlink8-gen4+roce100", [(8, 450), (8, 12.5)]),
        ("a100-80gb:64@nvlink8-gen4+hdr", [(8, 450), (8, 25)]),
        ("l40s:16@pcie8+eth25", [(8, 32), (2, 3.125)]),
        ("h100:16@8x400GB/s+200Gb/s", [(8, 400), (2, 25)]),
        ("trn2:256@neuronlink16+zlink4+efa200", [(4, 128), (4, 128), (4, 64), (4, 25)]),
        ("mi300x:64@xgmi8+roce400", [(8, 448), (8, 50)]),
    ],
)
def test_text_reads_as_people_speak(text: str, expected: list[tuple[int, float]]) -> None:
    assert levels(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("tpuv5p:512@8x8x8", [(8, RINGS), (8, RINGS), (8, RINGS)]),
        ("tpuv5p:512@4x4x32", [(4, RINGS), (4, RINGS), (32, RINGS)]),
        ("tpuv5p:64@2x4x8", [(2, LINES), (4, RINGS), (8, RINGS)]),
        ("tpuv6e:256", [(16, RINGS), (16, RINGS)]),
        ("tpuv6e:64", [(8, LINES), (8, LINES)]),
        ("tpuv6e:512@16x16+dcn100", [(16, RINGS), (16, RINGS), (2, Links.SWITCH)]),
        ("tpuv5e:64@ici32+dcn25", [(4, LINES), (8, LINES), (2, Links.SWITCH)]),
        ("tpu7x:128", [(2, Links.SWITCH), (4, RINGS), (4, RINGS), (4, RINGS)]),
        ("trn2:16", [(4, RINGS), (4, RINGS)]),
    ],
)
def test_tori_are_rows_that_close_where_their_links_do(text: str, expected: list[tuple[int, Links]]) -> None:
    assert [(level.size, level.links) for level in parse_cluster(text).levels] == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("h100:12@nvlink8+ib400", "'nvlink8' joins 8, and 12 is no multiple"),
        ("tpuv6e:300@16x16+dcn100", "'16x16' joins 256, and 300 is no multiple"),
        ("h100:768@nvlink8+ib400x64+ib400", "'ib400x64' joins 64, and 96 is no multiple"),
        ("h100:64@nvlink8", "'nvlink8' leaves 8 groups that nothing joins.*nvlink8.ib400"),
        ("h100:64@ib400+ib200", "'ib400' already joins all devices.*'ib200' behind it"),
        ("h100:64@nvlink8+ib350", "'ib350' in 'nvlink8.ib350': there is no InfiniBand of 350 Gb/s; known are ib10"),
        ("h100:64@nvlink8+ib", "there is no InfiniBand of no speed"),
        ("h100:64@dgx-h100+ib400", "'dgx-h100' in .*: it is a whole network"),
        ("mi300x:64@nvlink8+ib400", "mi300x has no nvlink; its own links are xgmi.*nvlink8-gen4"),
        ("h100:64@xgmi8+ib400", "h100 has no xgmi; its own links are nvlink"),
        ("h100:64@nvlink8-gen9+ib400", "unknown generation 9 of nvlink; known are 1, 2, 3, 4, 5"),
        ("h100:64@8x8", "h100 has no links that form a torus"),
        ("tpuv6e:64@4x4x4", "the ici links of tpuv6e form 2 dimensions"),
        ("h100:64@nvlink8+ib400/0.5", "/0.5 is not a factor of at least 1"),
        ("h100:64@nvlink8+ib400*2", "[*]2 is not a share above 0 and at most 1"),
        ("h100:64@nvlink8+ib400*0.5.5", "is not a share"),
        ("h100:64@nvlink0+ib400", "0 members; expected 1 to"),
        ("h100:64@nvlink8+0GB/s", "expected a bandwidth above 0"),
        ("tpuv4:64@ici99999999999+dcn50", "members; expected 1 to"),
        ("h100:64@nvlink8+", "nothing stands on one side of a [+]"),
    ],
)
def test_text_that_contradicts_itself_is_refused_by_the_part_that_does(text: str, complaint: str) -> None:
    with pytest.raises(HardwareError, match=complaint):
        parse_cluster(text)


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("h100:64@nvlnk8+ib400", "'nvlnk8'.*Did you mean nvlink8"),
        ("h100:64@dgx-h10", "'dgx-h10'.*Did you mean dgx-h100"),
        ("h100:64@nvlink8+rce400", "'rce400'.*Did you mean roce400"),
        ("h100:64@nvlink8+3xfoo", "unknown network '3xfoo'"),
        ("h100:64@?", "unknown network '[?]'"),
    ],
)
def test_a_misspelt_network_offers_near_names(text: str, near: str) -> None:
    with pytest.raises(UnknownNameError, match=near):
        parse_cluster(text)


def test_what_oversubscription_did_is_part_of_the_source() -> None:
    level = network("ib400/2").levels[0]
    assert level.bandwidth_bytes_per_s.source == "one 400 Gb/s adapter per device; 2 to 1 oversubscribed"
    assert network("nvlink8-gen5+ib400").title == "8 by nvlink8-gen5, then ib400"
