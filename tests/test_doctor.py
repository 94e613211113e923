"""The doctor says what serves a file here, with evidence, and what to do about a no."""


import torch
from helpers import lack_of_uring, refuses_direct, run_script

from gdsdata import calibration, doctor
from gdsdata.errors import IoError


def answers(path):
    return {finding.question.split(" on ")[0]: finding for finding in doctor.examine(path)}


def test_each_line_has_its_evidence_and_each_no_a_remedy(tmp_path):
    (tmp_path / "x").write_bytes(bytes(1 << 20))
    for path in (tmp_path, tmp_path / "x"):
        found = answers(path)
        assert found["io_uring"].answer == ("no" if lack_of_uring() else "yes")
        assert found["O_DIRECT"].answer == ("no" if refuses_direct(tmp_path / "x") else "yes")
        assert found["GPU"].answer == ("yes" if torch.cuda.is_available() else "no")
        assert all(finding.evidence and (finding.remedy or finding.answer == "yes") for finding in found.values())
    assert [file.name for file in tmp_path.iterdir()] == ["x"], "nothing is left behind"


def test_what_refuses_direct_io_is_a_no_with_the_systems_reason(tmp_path, monkeypatch):
    def refuse(path):
        raise IoError(22, "could not read with O_DIRECT: Invalid argument", path)

    monkeypatch.setattr(doctor, "_read_direct", refuse)
    finding = answers(tmp_path)["O_DIRECT"]
    assert finding.answer == "no" and "Invalid argument" in finding.evidence and "page cache" in finding.remedy


def test_a_file_too_short_to_tell_is_unknown(tmp_path):
    (tmp_path / "x").write_bytes(b"x")
    assert answers(tmp_path / "x")["O_DIRECT"].answer == "unknown"


def test_as_a_program(tmp_path):
    script = "import runpy, sys; sys.argv[0] = 'doctor'; runpy.run_module('gdsdata.doctor', run_name='__main__')"
    code, out, _ = run_script(script, tmp_path)
    assert code == 0 and "io_uring: " in out and f"O_DIRECT on '{tmp_path}': " in out
    code, _, err = run_script(script, tmp_path / "absent")
    assert code == 2 and f"there is no '{tmp_path / 'absent'}'" in err


def test_the_calibration_that_is_kept_is_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # as on a machine with a GPU, which this asks nothing
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.setattr(doctor.engine, "resolved", lambda device: torch.device("cuda", 0))
    assert answers(tmp_path)["calibration"].answer == "unknown"
    place = calibration.place_of(str(tmp_path), torch.device("cuda", 0))
    calibration._keep(place, calibration.Calibration(workers=4, gb_per_s={"page cache, 4 workers": 50.0}, seconds=0.6))
    found = answers(tmp_path)
    assert found["calibration"].answer == "yes"
    assert "workers=4" in found["calibration"].evidence
    assert "50.0 GB/s (page cache, 4 workers)" in found["calibration"].evidence
    assert found["GPUDirect Storage"].answer == ("yes" if doctor.engine.cufile_dma_is_possible() else "no")
