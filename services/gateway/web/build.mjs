// Bundles src/ into bundle/: run by `make web`, and by a test that compares the result.
// `node build.mjs [DIRECTORY]` writes elsewhere.
import { build } from "esbuild";
import { cp, mkdir, readFile, writeFile } from "node:fs/promises";
import path from "node:path";
import { fileURLToPath } from "node:url";

const here = path.dirname(fileURLToPath(import.meta.url));
const out = path.resolve(process.argv[2] ?? path.join(here, "bundle"));

await mkdir(out, { recursive: true });
const result = await build({
  absWorkingDir: here,
  entryPoints: { app: "src/main.jsx" },
  outdir: out,
  bundle: true,
  minify: true,
  format: "esm",
  target: ["chrome111", "firefox113", "safari16.4"],
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none", // whole licences are in licenses.txt
  metafile: true,
  logLevel: "warning",
});
for (const name of ["index.html", "icon.svg"]) {
  await cp(path.join(here, "src", name), path.join(out, name));
}
await writeFile(path.join(out, "licenses.txt"), await licenses(result.metafile.inputs));

/** The licences of every package that something of is in the bundle. */
async function licenses(inputs) {
  const names = new Set();
  for (const input of Object.keys(inputs)) {
    const match = input.match(/^node_modules\/((?:@[^/]+\/)?[^/]+)\//);
    if (match) names.add(match[1]);
  }
  const parts = ["The page at / contains these packages, under the licences that follow.\n"];
  for (const name of [...names].sort()) {
    const home = path.join(here, "node_modules", name);
    const { version, license } = JSON.parse(await readFile(path.join(home, "package.json"), "utf8"));
    parts.push(`${"=".repeat(78)}\n${name} ${version} (${license})\n${"=".repeat(78)}\n`);
    parts.push(await licenseText(home));
  }
  return parts.join("\n");
}

async function licenseText(home) {
  for (const name of ["LICENSE", "license", "LICENSE.md", "LICENSE.txt"]) {
    try {
      return (await readFile(path.join(home, name), "utf8")).replaceAll("\r\n", "\n");
    } catch (error) {
      if (error.code !== "ENOENT") throw error;
    }
  }
  throw new Error(`${home} has no licence file`);
}
