// Builds one file: the script and the styles are put into the page, with the licences of what is bundled.
import { existsSync, readFileSync } from "node:fs";
import { defineConfig, type Plugin } from "vite";

const { dependencies } = JSON.parse(readFileSync(new URL("package.json", import.meta.url), "utf8"));

function licences(): string {
  return Object.keys(dependencies)
    .map((name) => {
      const folder = new URL(`node_modules/${name}/`, import.meta.url);
      const { version, license } = JSON.parse(readFileSync(new URL("package.json", folder), "utf8"));
      const file = new URL("LICENSE", folder);
      return `${name} ${version} (${license})\n\n${existsSync(file) ? readFileSync(file, "utf8").trim() : ""}`;
    })
    .join("\n\n――――\n\n");
}

function oneFile(): Plugin {
  return {
    name: "one-file",
    enforce: "post",
    generateBundle(_, bundle) {
      const page = bundle["index.html"];
      if (page?.type !== "asset") return;
      let html = String(page.source);
      for (const [name, part] of Object.entries(bundle)) {
        if (part === page) continue;
        const text = part.type === "chunk" ? part.code : String(part.source);
        const tag = new RegExp(`<(?:script|link)[^>]*${name.replaceAll(".", "\\.")}[^>]*>(?:</script>)?\\s*`);
        html = html.replace(tag, "");
        // As functions: a replacement text would have its dollar signs read.
        if (part.type === "chunk") {
          const safe = text.trim().replaceAll("</script", "<\\/script").replaceAll("<!--", "<\\!--");
          html = html.replace("</body>", () => `<script type="module">${safe}</script>\n</body>`);
        } else html = html.replace("</head>", () => `<style>${text.trim()}</style>\n</head>`);
        delete bundle[name];
      }
      page.source = html;
    },
  };
}

export default defineConfig({
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  define: { LICENCES: JSON.stringify(licences()) },
  build: { outDir: "dist", target: "es2022", assetsInlineLimit: 0, modulePreload: false, cssCodeSplit: false },
  plugins: [oneFile()],
});
