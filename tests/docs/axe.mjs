// Open pages in light and dark, wide and narrow, and print as JSON what is wrong with each.
// node axe.mjs MODULES CHROMIUM ROOT PAGE...
import { createRequire } from "node:module";

const [modules, executablePath, root, ...pages] = process.argv.slice(2);
const require = createRequire(`${modules}/`);
const { chromium } = require("playwright-core");
const axe = require.resolve("axe-core/axe.min.js");

const browser = await chromium.launch({ executablePath, args: ["--no-sandbox"] });
const found = [];
for (const colorScheme of ["light", "dark"]) {
  for (const width of [1280, 390]) {
    const context = await browser.newContext({ colorScheme, viewport: { width, height: 900 } });
    for (const path of pages) {
      const page = await context.newPage();
      const where = `${path} ${colorScheme} ${width}`;
      const outside = [];
      page.on("request", (request) => request.url().startsWith(root) || outside.push(request.url()));
      page.on("pageerror", (error) => found.push(`${where}: ${error.message}`));
      await page.goto(root + path, { waitUntil: "load" });
      await page.addScriptTag({ path: axe });
      const { violations } = await page.evaluate(() => axe.run());
      for (const { id, help, nodes } of violations)
        found.push(`${where}: ${id}: ${help}: ${nodes.length}: ${nodes[0].html.slice(0, 200)}`);
      const over = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
      if (over > 0) found.push(`${where}: ${over} pixels wider than the window`);
      for (const url of outside) found.push(`${where}: asks for ${url}`);
      await page.close();
    }
    await context.close();
  }
}
await browser.close();
console.log(JSON.stringify(found));
