// CPython compiled to WebAssembly, by npm's `pyodide`: node pyodide.mjs FOLDER ROOT TESTS SCRIPT ARGUMENT...
// FOLDER is where npm installed it, ROOT this repository, TESTS the folder of another Python's `test` package.
import { pathToFileURL } from "node:url";

const [folder, root, tests, script, ...rest] = process.argv.slice(2);
const { loadPyodide } = await import(pathToFileURL(`${folder}/node_modules/pyodide/pyodide.mjs`));
const python = await loadPyodide();
python.mountNodeFS("/root", root);
python.globals.set("argv", python.toPy([`/root/${script}`, ...rest]));
python.runPython(`
import shutil, sys
library = f"/lib/python3.{sys.version_info[1]}"
shutil.unpack_archive(f"/lib/python3{sys.version_info[1]}.zip", library)  # so that sources are files, as elsewhere
sys.path[:] = [library if path.endswith(".zip") else path for path in sys.path]
sys.path_importer_cache.clear()
sys.argv = argv
`);
python.mountNodeFS(python.runPython(`library + "/test"`), tests);
python.runPython(`
import runpy
runpy.run_path(sys.argv[0], run_name="__main__")
`);
