"""Tags merged into XMP packets of all shapes; ElementTree, which `xmp.py` does not use, reads what came out."""

from xml.etree import ElementTree as ET
from xml.sax.saxutils import escape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pivotpatch.errors import InputError
from pivotpatch.runtime.sidecars import clean_label
from pivotpatch.runtime.xmp import EMPTY, LARGEST, leaf_of, merge_tags, read_record

RDF = "{http://www.w3.org/1999/02/22-rdf-syntax-ns#}"
DC = "{http://purl.org/dc/elements/1.1/}subject"
LR = "{http://ns.adobe.com/lightroom/1.0/}hierarchicalSubject"
DIGIKAM = "{http://www.digikam.org/ns/1.0/}TagsList"
FOREIGN = (
    '<!-- by hand --><r:Description r:about="uuid:1" xmlns:q="urn:q/" q:note="two&#10;lines &amp; &quot;more&quot;">'
    '<q:deep r:parseType="Resource"><dc:subject xmlns:dc="http://purl.org/dc/elements/1.1/">not a tag</dc:subject>'
    "</q:deep><q:raw><![CDATA[ <li/> ]]>a/></q:raw></r:Description>"
)
NAMES = ["cat", "Dog", "hot dog", "animals|cat", "a, b", "<&>\"'", "猫", "zoo|animals|cat", "ß", "]]>", "a/b"]
TAGS = st.lists(st.sampled_from(NAMES) | st.text(min_size=1).map(clean_label).filter(bool), max_size=5)


def make_packet(lists: dict[str, list[str]], gap: str = "\n ", kind: str = "Bag", bom: bytes = b"") -> bytes:
    """A packet as another program may have left it, with lists of its own and other properties around them."""
    text = f'<r:RDF xmlns:r="{RDF[1:-1]}">{gap}{FOREIGN}'
    for property_name, items in lists.items():
        space, _, name = property_name[1:].partition("}")
        inside = "".join(f"{gap}<r:li>{escape(item)}</r:li>" for item in items)
        bag = f"<r:{kind}>{inside}{gap}</r:{kind}>" if items else f"<r:{kind} />"
        text += f'{gap}<r:Description r:about="uuid:1"><p:{name} xmlns:p="{space}">{bag}</p:{name}></r:Description>'
    return bom + f"<?xml version='1.0' encoding='UTF-8'?>{text}{gap}</r:RDF>   \n".encode()


PACKETS = st.just(EMPTY) | st.builds(
    make_packet,
    st.dictionaries(st.sampled_from([DC, LR, DIGIKAM]), TAGS),
    st.sampled_from(["", " ", "\n  ", "\r\n\t"]),
    st.sampled_from(["Bag", "Seq", "Alt"]),
    st.sampled_from([b"", b"\xef\xbb\xbf"]),
)


def merge(packet: bytes, tags: list[str]) -> bytes:
    return merge_tags(packet, tags, suffix=".jpg", where="photo.jpg.xmp")


def read(packet: bytes, name: str) -> list[str]:
    """The items of a list, in order."""
    path = f"{RDF}Description/{name}/*/{RDF}li"
    root = ET.fromstring(packet)
    rdf = root if root.tag == f"{RDF}RDF" else root.find(f"{RDF}RDF")
    assert rdf is not None
    return [(item.text or "").strip() for item in rdf.findall(path)]


def leaves(packet: bytes) -> set[str]:
    """What somebody sees of all lists, in small letters."""
    seen = [*read(packet, DC), *(item.rpartition("|")[2] for item in read(packet, LR))]
    return {name.casefold() for name in (*seen, *(item.rpartition("/")[2] for item in read(packet, DIGIKAM)))}


def show(packet: bytes) -> str:
    """Without unused declarations and white space between elements."""
    return ET.canonicalize(packet.removeprefix(b"\xef\xbb\xbf").decode(), strip_text=True, with_comments=True)


@given(PACKETS, TAGS)
def test_a_second_run_changes_nothing(packet: bytes, tags: list[str]) -> None:
    once = merge(packet, tags)
    assert merge(once, tags) == once
    assert merge(once, tags[::-1]) == once


@given(PACKETS, TAGS.map(lambda tags: [tag for tag in tags if "/" not in tag]))  # digiKam takes it for a hierarchy
def test_every_tag_is_there_once_and_what_was_there_stays(packet: bytes, tags: list[str]) -> None:
    merged = merge(packet, tags)
    assert leaves(merged) == leaves(packet) | {leaf_of(tag).casefold() for tag in tags if tag}
    for name in (DC, LR, DIGIKAM):
        before, after = read(packet, name), read(merged, name)
        assert after[: len(before)] == before
        assert len(set(after[len(before) :])) == len(after) - len(before)
    if packet != EMPTY:
        assert FOREIGN.encode() in merged
    record = read_record(merged, where="")
    assert record is not None
    assert record.suffix == ".jpg"
    assert set(record.tags) == {tag for tag in tags if leaf_of(tag).casefold() not in leaves(packet)}


@given(PACKETS, TAGS, TAGS)
def test_a_later_run_takes_out_its_own_tags_only(packet: bytes, first: list[str], second: list[str]) -> None:
    later, alone = merge(merge(packet, first), second), merge(packet, second)
    for name in (DC, LR, DIGIKAM):
        assert sorted(read(later, name)) == sorted(read(alone, name)), name
    assert set(read_record(later, where="").tags) == set(read_record(alone, where="").tags)  # type: ignore[union-attr]


@given(PACKETS.filter(lambda packet: b" />" not in packet), TAGS)
def test_tags_that_come_and_go_leave_no_trace(packet: bytes, tags: list[str]) -> None:
    assert show(merge(merge(packet, tags), [])) == show(merge(packet, []))


def test_a_new_packet_is_what_photo_managers_read() -> None:
    made = merge(EMPTY, ["animals|cat", "a & b"])
    assert read(made, DC) == ["cat", "a & b"]
    assert read(made, LR) == ["animals|cat", "a & b"]
    assert made.startswith(b'<?xpacket begin="\xef\xbb\xbf" id="W5M0MpCehiHzreSzNTczkc9d"?>\n')
    assert made.endswith(b'</x:xmpmeta>\n<?xpacket end="w"?>\n')


def test_a_tag_that_the_user_sorts_into_a_hierarchy_is_hers_from_then_on() -> None:
    merged = merge(make_packet({DC: [], LR: []}), ["cat"]).replace(b">cat</r:li>", b">animals|cat</r:li>", 2)
    merged = merged.replace(b">animals|cat</r:li>", b">cat</r:li>", 1)
    assert (read(merged, DC), read(merged, LR)) == (["cat"], ["animals|cat"])
    later = merge(merged, ["dog"])
    assert (read(later, DC), read(later, LR)) == (["cat", "dog"], ["animals|cat", "dog"])


BOMB = '<!DOCTYPE x [<!ENTITY a "aaaaaaaa">]><x/>'
ENTITY = '<!DOCTYPE x [<!ENTITY a SYSTEM "file:///etc/passwd">]><x>&a;</x>'
ATTRIBUTE = f'<r:RDF xmlns:r="{RDF[1:-1]}"><r:Description xmlns:d="{DC[1:-8]}" d:subject="cat"/></r:RDF>'
PLAIN = ATTRIBUTE.replace(' d:subject="cat"/>', "><d:subject>cat</d:subject></r:Description>")


@pytest.mark.parametrize(
    ("packet", "wrong"),
    [
        (b"", "is not valid XML (no element found: line 1, column 0); repair it"),
        (EMPTY[:-40], "is not valid XML"),
        (b"<a/>", "is no XMP: it has no rdf:RDF"),
        (BOMB.encode(), "has a DOCTYPE"),
        (ENTITY.encode(), "has a DOCTYPE"),
        (BOMB.encode("utf-16"), "is not written in UTF-8"),
        (BOMB.encode("utf-16-le"), "is not written in UTF-8"),
        (b"<?xml version='1.0' encoding='latin-1'?><a/>", "is written in 'latin-1'; save it as UTF-8"),
        (EMPTY.replace(b"<rdf:RDF", b"<rdf:RDF a='\xe9'"), "is not written in UTF-8"),
        (ATTRIBUTE.encode(), "dc:subject is no list"),
        (PLAIN.encode(), "dc:subject is no list"),
        (b" " * (LARGEST + 1), "is too large for a sidecar (8,388,609 bytes)"),
        (b"<a>" + b"<b/>" * 800_000 + b"</a>", "is too large for a sidecar"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "packet",
)
def test_what_cannot_be_merged_is_an_error_of_one_line(packet: bytes, wrong: str) -> None:
    with pytest.raises(InputError) as raised:
        merge(packet, ["cat"])
    assert str(raised.value).startswith(f"photo.jpg.xmp: {wrong}")
