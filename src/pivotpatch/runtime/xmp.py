"""Tags in an XMP packet, added and taken out: it is parsed to learn where things are, and no other byte is touched."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from xml.parsers import expat
from xml.sax.saxutils import escape, quoteattr

from pivotpatch.errors import InputError, explaining, quote

LARGEST = 8 * 2**20  # bytes of a packet; masks of an image editor take some of them
_MOST = 400_000  # tags of XML; a long history of edits has some thousands
EMPTY = (
    b'<?xpacket begin="\xef\xbb\xbf" id="W5M0MpCehiHzreSzNTczkc9d"?>\n<x:xmpmeta xmlns:x="adobe:ns:meta/">\n'
    b' <rdf:RDF xmlns:rdf="http://www.w3.org/1999/02/22-rdf-syntax-ns#">\n </rdf:RDF>\n</x:xmpmeta>\n'
    b'<?xpacket end="w"?>\n'
)
"""A packet without any property."""

_BOM = b"\xef\xbb\xbf"
_RDF = "http://www.w3.org/1999/02/22-rdf-syntax-ns#"
_SPACES = {
    "dc": "http://purl.org/dc/elements/1.1/",
    "lr": "http://ns.adobe.com/lightroom/1.0/",
    "digiKam": "http://www.digikam.org/ns/1.0/",
    "pivotpatch": "urn:pivotpatch:xmp:1.0/",
}
_RECORD = "pivotpatch:tags"  # which tags are ours: a later run takes out no others
_SUFFIX = f"{_SPACES['pivotpatch']} suffix"
_SEPARATORS = {"dc:subject": None, "lr:hierarchicalSubject": "|", "digiKam:TagsList": "/"}
_PROPERTIES = {f"{_SPACES[name.partition(':')[0]]} {name.partition(':')[2]}": name for name in (*_SEPARATORS, _RECORD)}


class Record(NamedTuple):
    """What an earlier run left in a packet: its tags, and the suffix of the image they are of."""

    tags: tuple[str, ...]
    suffix: str | None


@dataclass(slots=True)
class _Element:
    """Where an element stands: its first byte, that of its end tag, and the one behind it."""

    name: str
    attributes: dict[str, str]
    start: int
    close: int = 0
    end: int = 0
    is_empty_tag: bool = False
    texts: list[str] = field(default_factory=list)
    children: list["_Element"] = field(default_factory=list)


class _List(NamedTuple):
    """A property that holds a list: `<dc:subject> <rdf:Bag> <rdf:li>...`."""

    element: _Element
    container: _Element

    @property
    def texts(self) -> list[str]:
        return ["".join(item.texts).strip() for item in self.container.children]


class _Edit(NamedTuple):
    start: int
    end: int
    text: bytes


def leaf_of(tag: str) -> str:
    """The last part of a tag in a hierarchy.

    >>> leaf_of("animals|cat"), leaf_of("cat")
    ('cat', 'cat')
    """
    return tag.rpartition("|")[2]


def read_record(packet: bytes, *, where: str) -> Record | None:
    """Which tags of a packet are ours; None where no run has been."""
    rdf = _parse(packet.removeprefix(_BOM), where)
    records = _find_lists(rdf, where)[_RECORD]
    if not records:
        return None
    tags = tuple(text for record in records for text in record.texts)
    simple = [child.attributes.get(_SUFFIX) for child in rdf.children]  # other programs write it as an element
    simple += ["".join(each.texts) for child in rdf.children for each in child.children if each.name == _SUFFIX]
    return Record(tags, next(filter(None, simple), None))


def merge_tags(packet: bytes, tags: Sequence[str], *, suffix: str, where: str) -> bytes:
    """A packet with these tags of ours instead of those an earlier run left.

    A tag such as `animals|cat` is a hierarchy: `dc:subject` gets its last part. What the user has already, in any of
    the lists and with any ancestors, is neither added nor ever taken out. The list of digiKam, which it and others
    prefer to the rest, is kept in step where there is one.

    Args:
        packet: UTF-8, such as `EMPTY`.
        tags: without control characters, and without spaces around them.
        suffix: of the image.
        where: the name of the packet's file, for messages.
    """
    bom = _BOM if packet.startswith(_BOM) else b""
    packet = packet.removeprefix(_BOM)
    rdf = _parse(packet, where)
    lists = _find_lists(rdf, where)
    earlier = {text for record in lists[_RECORD] for text in record.texts}
    theirs = {
        name: {text for found in lists[name] for text in found.texts} - {_to_form(name, tag) for tag in earlier}
        for name in _SEPARATORS
    }
    ours = [tag for tag in dict.fromkeys(tags) if not _has(theirs, tag)]
    gone = [tag for tag in earlier.difference(ours) if not _has(theirs, tag)]
    edits: list[_Edit] = []
    new: dict[str, list[str]] = {}
    for name in _SEPARATORS:
        wanted = list(dict.fromkeys(_to_form(name, tag) for tag in ours))
        dropped = {_to_form(name, tag) for tag in gone}.difference(wanted)
        if lists[name]:
            edits += _edit_lists(packet, lists[name], wanted, dropped)
        elif wanted and name != "digiKam:TagsList":
            new[name] = wanted
    if lists[_RECORD]:
        edits += _edit_lists(packet, lists[_RECORD], ours, earlier.difference(ours), keep=True)
    else:
        new[_RECORD] = ours
    if new:
        about = next((child.attributes.get(f"{_RDF} about", "") for child in rdf.children), "")
        edits.append(_insert(packet, rdf, [_describe(new, about=about, suffix=suffix)], indent=b"\n  "))
    parts, done = [bom], 0
    for edit in sorted(edits):
        parts += [packet[done : edit.start], edit.text]
        done = edit.end
    return b"".join([*parts, packet[done:]])


def _to_form(name: str, tag: str) -> str:
    separator = _SEPARATORS[name]
    return leaf_of(tag) if separator is None else tag.replace("|", separator)


def _has(lists: dict[str, set[str]], tag: str) -> bool:
    """Whether a tag is in one of some lists, with any ancestors and in any case of letters."""
    leaf = leaf_of(tag).casefold()
    for name, texts in lists.items():
        separator = _SEPARATORS[name]
        leaves = {text.rpartition(separator)[2].strip().casefold() if separator else text.casefold() for text in texts}
        if leaf in leaves or _to_form(name, tag) in texts:
            return True
    return False


def _parse(packet: bytes, where: str) -> _Element:
    """The `rdf:RDF` of a packet with all in it. Declarations of entities are refused before the parser sees them."""
    if len(packet) > LARGEST or packet.count(b"<") > _MOST:
        raise InputError(where, f"is too large for a sidecar ({len(packet):,} bytes)", "move it away")
    with explaining(where, "is not written in UTF-8", "save it as UTF-8 or move it away", of=ValueError):
        if "\0" in packet.decode():  # of UTF-16 the parser would follow the signs, whatever it is told
            raise ValueError("a NUL in it")
    if b"<!DOCTYPE" in packet:
        raise InputError(where, "has a DOCTYPE, which no XMP needs", "remove the declaration or move the file away")
    top = _Element("", {}, 0)
    stack = [top]
    parser = expat.ParserCreate("utf-8", " ")
    parser.buffer_text = True

    def check_encoding(_version: str, encoding: str | None, _standalone: int) -> None:
        if encoding and encoding.lower() != "utf-8":
            raise InputError(where, f"is written in {quote(encoding)}", "save it as UTF-8")

    def start(name: str, attributes: dict[str, str]) -> None:
        stack[-1].children.append(_Element(name, attributes, parser.CurrentByteIndex))
        stack.append(stack[-1].children[-1])

    def end(_name: str) -> None:
        element = stack.pop()
        element.close = parser.CurrentByteIndex
        is_bare = not element.children and not element.texts  # the end of an empty tag is the place behind it
        element.is_empty_tag = is_bare and packet[element.close - 2 : element.close] == b"/>"
        element.end = element.close if element.is_empty_tag else packet.index(b">", element.close) + 1

    parser.XmlDeclHandler = check_encoding
    parser.StartElementHandler, parser.EndElementHandler = start, end
    parser.CharacterDataHandler = lambda text: stack[-1].texts.append(text)
    with explaining(where, "is not valid XML", "repair it or move it away", of=expat.ExpatError):
        parser.Parse(packet, True)
    for element in (*top.children, *top.children[0].children):
        if element.name == f"{_RDF} RDF":
            return element
    raise InputError(where, "is no XMP: it has no rdf:RDF", "move it away")


def _find_lists(rdf: _Element, where: str) -> dict[str, list[_List]]:
    """The properties that hold tags, by their usual names."""
    found: dict[str, list[_List]] = {name: [] for name in _PROPERTIES.values()}
    for description in rdf.children:
        for attribute in _PROPERTIES.keys() & description.attributes:
            raise InputError(where, f"{_PROPERTIES[attribute]} is no list", "make it one or move the file away")
        for element in description.children:
            name = _PROPERTIES.get(element.name)
            if name is None:
                continue
            if [child.name for child in element.children] not in ([f"{_RDF} Bag"], [f"{_RDF} Seq"], [f"{_RDF} Alt"]):
                raise InputError(where, f"{name} is no list", "make it one or move the file away")
            found[name].append(_List(element, element.children[0]))
    return found


def _edit_lists(
    packet: bytes, lists: list[_List], wanted: Iterable[str], dropped: set[str], *, keep: bool = False
) -> list[_Edit]:
    """Take items out of lists and add what is missing to the first; unless `keep`, a list that is left empty goes."""
    edits = []
    present = {text for found in lists for text in found.texts}
    missing = [text for text in wanted if text not in present]
    for found in lists:
        out = [
            item
            for item, text in zip(found.container.children, found.texts, strict=True)
            if text in dropped and not item.children
        ]
        if out and len(out) == len(found.container.children) and not missing and not keep:
            edits.append(_remove(packet, found.element))
            continue
        edits += [_remove(packet, item) for item in out]
        if missing:
            prefix, colon, _ = _read_name(packet, found.container).decode().rpartition(":")
            items = [f"<{prefix}{colon}li>{escape(text)}</{prefix}{colon}li>".encode() for text in missing]
            edits.append(_insert(packet, found.container, items))
            missing = []
    return edits


def _remove(packet: bytes, element: _Element) -> _Edit:
    """With the white space before it."""
    return _Edit(_skip_back(packet, element.start), element.end, b"")


def _insert(packet: bytes, parent: _Element, elements: Iterable[bytes], *, indent: bytes = b"") -> _Edit:
    """Behind the last child of an element, indented as that is."""
    if parent.children:
        last = parent.children[-1]
        indent = packet[_skip_back(packet, last.start) : last.start]
        place = last.end
    else:
        place = _skip_back(packet, parent.close)
    text = b"".join(indent + element for element in elements)
    if parent.is_empty_tag:
        return _Edit(parent.close - 2, parent.close, b">" + text + b"</" + _read_name(packet, parent) + b">")
    return _Edit(place, place, text)


def _skip_back(packet: bytes, place: int) -> int:
    """The beginning of the white space before a place."""
    while packet[place - 1 : place].isspace():
        place -= 1
    return place


def _read_name(packet: bytes, element: _Element) -> bytes:
    """An element's name as it is written, with its prefix."""
    return packet[element.start + 1 : element.end].split(None, 1)[0].split(b">")[0].rstrip(b"/")


def _describe(properties: dict[str, list[str]], *, about: str, suffix: str) -> bytes:
    """An element with new properties, which brings all names that it needs."""
    spaces = {"rdf": _RDF} | {name.partition(":")[0]: _SPACES[name.partition(":")[0]] for name in properties}
    head = "".join(f" xmlns:{prefix}={quoteattr(space)}" for prefix, space in spaces.items())
    if _RECORD in properties:
        head += f" pivotpatch:suffix={quoteattr(suffix)}"
    lines = [f"<rdf:Description rdf:about={quoteattr(about)}{head}>"]
    for name, texts in properties.items():
        items = [f"     <rdf:li>{escape(text)}</rdf:li>" for text in texts]
        lines += [f"   <{name}>", "    <rdf:Bag>", *items, "    </rdf:Bag>", f"   </{name}>"]
    return "\n".join([*lines, "  </rdf:Description>"]).encode()
