"""What users install holds all that the program reads: a wheel, a wheel from the sdist, and a checkout."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
DATA = (".cu", ".cuh", ".tcss", ".typed", ".py")


def build(source, target, out):
    """Build one distribution with the backend that pyproject.toml names; its path."""
    command = [sys.executable, "-m", "hatchling", "build", "-t", target, "-d", str(out)]
    subprocess.run(command, cwd=source, check=True, capture_output=True, timeout=120)
    return next(out.iterdir())


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    """A folder with the unpacked package for each way to install it."""
    root = tmp_path_factory.mktemp("packages")
    sdist = build(REPOSITORY, "sdist", root / "sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(root / "source", filter="data")
    source = next((root / "source").iterdir())
    wheels = {"wheel": REPOSITORY, "sdist": source}
    for name, checkout in wheels.items():
        with zipfile.ZipFile(build(checkout, "wheel", root / f"{name}-dist")) as archive:
            archive.extractall(root / name)
    return {"wheel": root / "wheel", "sdist": root / "sdist", "checkout": REPOSITORY}


WAYS = ("wheel", "sdist", "checkout")


@pytest.mark.parametrize("way", WAYS)
def test_every_file_of_the_package_is_there(packages, way):
    package = REPOSITORY / "exl2chat"
    wanted = {path.relative_to(package) for path in package.rglob("*") if path.suffix in DATA}
    installed = packages[way] / "exl2chat"
    assert not {path for path in wanted if not (installed / path).is_file()}


@pytest.mark.parametrize("way", WAYS)
def test_the_themes_are_found(packages, way, tmp_path):
    code = (
        "import sys, exl2chat; from pathlib import Path; from exl2chat.paths import Paths, theme_files\n"
        "print(exl2chat.__file__, *sorted(theme_files(Paths.default(Path(sys.argv[1])))))"
    )
    command = [sys.executable, "-P", "-c", code, str(tmp_path)]
    done = subprocess.run(
        command, cwd=tmp_path, env={"PYTHONPATH": str(packages[way])}, capture_output=True, text=True, timeout=60
    )
    where, *themes = done.stdout.split()
    assert Path(where).is_relative_to(packages[way])
    assert themes == sorted(path.stem for path in (REPOSITORY / "themes").glob("*.toml"))


def test_the_source_distribution_holds_the_tests(packages):
    source = next((packages["sdist"].parent / "source").iterdir())
    assert (source / "tests" / "test_packaging.py").is_file()
    assert (source / "LICENSE").is_file()
