// The build that is committed in server/relax_server/viewer/static: relative addresses, no source maps, nothing inline.
import { defineConfig } from "vite";

export default defineConfig({
  base: "./",
  build: {
    outDir: "../server/relax_server/viewer/static",
    emptyOutDir: true,
    target: "es2022",
    sourcemap: false,
    assetsInlineLimit: 0,
    modulePreload: false,
    chunkSizeWarningLimit: 400,
  },
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
});
