// The build that is committed in server/relax_server/viewer/static: relative addresses, no source maps, nothing inline.
import { defineConfig, type Plugin } from "vite";

/** Names the code that draws the page in its HTML, so that it is loaded beside the small file that asks for the data. */
function preload(name: string): Plugin {
  return {
    name: "preload-in-html",
    transformIndexHtml: {
      order: "post",
      handler(_, { bundle }) {
        const chunks = Object.values(bundle ?? {}).filter((file) => file.type === "chunk");
        const entries = chunks.filter((chunk) => chunk.isEntry).map((chunk) => chunk.fileName);
        const wanted = chunks.filter((chunk) => chunk.name === name).flatMap((chunk) => [chunk.fileName, ...chunk.imports]);
        const files = wanted.filter((file) => !entries.includes(file));
        return files.map((file) => ({ tag: "link", attrs: { rel: "modulepreload", crossorigin: true, href: `./${file}` }, injectTo: "head" }));
      },
    },
  };
}

export default defineConfig({
  base: "./",
  plugins: [preload("start")],
  build: {
    outDir: "../server/relax_server/viewer/static",
    emptyOutDir: true,
    target: "es2022",
    sourcemap: false,
    assetsInlineLimit: 0,
    cssCodeSplit: false,
    modulePreload: { polyfill: false },
    chunkSizeWarningLimit: 400,
  },
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
});
