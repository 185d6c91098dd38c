"""Archives of files, and a small VOC 2007 on a test server."""

import tarfile
import zipfile
from io import BytesIO

from file_server import FileServer
from made_records import noise

from pivotpatch.data.prepare import DatasetPlan, RemoteFile
from pivotpatch.data.voc import LABELS


def tar_bytes(files: dict[str, bytes]) -> bytes:
    out = BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, BytesIO(content))
    return out.getvalue()


def zip_bytes(files: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    out = BytesIO()
    with zipfile.ZipFile(out, "w", method) as held:
        for name, content in files.items():
            held.writestr(name, content)
    return out.getvalue()


def serve_voc(server: FileServer, base_url: str) -> DatasetPlan:
    """Offer VOC 2007 with three images and two, all of cats; the plan says that it lies at `base_url`."""
    top = "VOCdevkit/VOC2007"
    for part, names in (("trainval", ["000005", "000007", "000009"]), ("test", ["000001", "000002"])):
        files = {f"{top}/ImageSets/Main/{part}.txt": "\n".join(names).encode()}
        for name in names:
            files[f"{top}/JPEGImages/{name}.jpg"] = noise(int(name), side=64)
        for label in LABELS:
            lines = [f"{name} {'1' if label == 'cat' else '-1'}\n" for name in names]
            files[f"{top}/ImageSets/Main/{label}_{part}.txt"] = "".join(lines).encode()
        server.serve(f"{part}.tar", tar_bytes(files))
    return DatasetPlan(
        (RemoteFile(f"{base_url}/trainval.tar"), RemoteFile(f"{base_url}/test.tar")),
        files={f"{top}/JPEGImages/*.jpg": 5},
        records={"voc:{root}/VOCdevkit@2007-trainval": (3,), "voc:{root}/VOCdevkit@2007-test": (1, 2)},
    )
