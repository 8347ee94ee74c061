// What failed in a run so far, by cause, as its newest step has counted it.
import { orderBy, type GrowingTable } from "../data/table";
import { link } from "../route";
import { count } from "../ui/format";
import { Panel } from "../ui/parts";

const PREFIX = "failures/";

export function Failures({ run, metrics }: { run: string; metrics: GrowingTable }) {
  const causes = failures(metrics);
  if (causes.length === 0) return null;
  return (
    <Panel title="Failures" side={<a href={link(["runs", run, "trajectories"], { status: "not_ok" })}>failed episodes</a>}>
      <div class="scroll" role="region" aria-label="Table of failures" tabIndex={0}>
        <table>
          <thead>
            <tr>
              <th scope="col">Failed by</th>
              <th scope="col" class="right">
                Attempts
              </th>
            </tr>
          </thead>
          <tbody>
            {causes.map(([cause, attempts]) => (
              <tr key={cause}>
                <th scope="row">{cause}</th>
                <td class="right">{count(attempts)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
      <p class="muted">An episode that failed and then succeeded when it was tried again is counted here, and is not among the failed ones.</p>
    </Panel>
  );
}

/** Causes with their numbers, the commonest first; each step counts all since the run began. */
function failures(metrics: GrowingTable): [string, number][] {
  const last = orderBy(metrics, "step").at(-1);
  if (last === undefined) return [];
  const names = [...metrics.columns.keys()].filter((name) => name.startsWith(PREFIX));
  const counted = names.map((name): [string, number] => [name.slice(PREFIX.length), metrics.number(name, last) ?? 0]);
  return counted.filter(([, n]) => n > 0).sort((a, b) => b[1] - a[1] || a[0].localeCompare(b[0]));
}
